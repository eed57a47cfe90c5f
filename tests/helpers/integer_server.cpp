// Answers calls of integer_products, whose arguments are the words of qt_integer_products.
#include "calls.h"

#include "server.h"

int main() {
    return serve<IntegerArguments>(
        [](const IntegerArguments& words) { return qt_baseline::integer_products(words); });
}
