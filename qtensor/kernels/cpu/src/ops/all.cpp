// The C++ ops, compiled together: their headers take the compiler longer than they do.
#include "attention_ops.cpp"
#include "product_ops.cpp"
#include "products.cpp"
#include "quantize_ops.cpp"
#include "register.cpp"
#include "state_ops.cpp"
#include "torch_abi.cpp"
