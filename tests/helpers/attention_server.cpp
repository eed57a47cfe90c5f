// Answers calls of attention, whose arguments are an AttentionCall.
#include "attention/calls.h"

#include "server.h"

extern "C" int qt_attention(const AttentionCall* call);

int main() {
    return serve<AttentionCall>([](const AttentionCall& call) { return qt_attention(&call) == 0; });
}
