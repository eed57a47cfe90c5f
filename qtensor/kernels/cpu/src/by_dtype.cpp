// All kernels of a dtype (QT_DTYPE) but those that quantize, compiled together.
#include "activation.cpp"
#include "dequantize.cpp"
#include "norm.cpp"
