// Stands in for CUDA's header of this name: what the kernels use of it, on a CPU.
#pragma once

using __half = _Float16;
inline float __half2float(__half x) { return x; }
inline __half __float2half_rn(float x) { return static_cast<__half>(x); }
