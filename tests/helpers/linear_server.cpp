// Answers calls of few_rows, whose arguments are the words of qt_linear.
#include "calls.h"

#include "server.h"

int main() {
    return serve<LinearArguments>([](LinearArguments words) {
        words.threads = 1;
        return qt_baseline::few_rows(*words.quantizer, qt_baseline::call_of(words));
    });
}
