// Short sources that serve all dtypes, compiled together.
#include "c_interface.cpp"
#include "dequantize_float16.cpp"
#include "finish.cpp"
#include "linear.cpp"
#include "quantize_float16.cpp"
