/* Vectors of floats, as long as the processor's, as the compiler has them: no intrinsics, and no
   library is needed. What is read by them has a multiple of 16 floats. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec x) { *(vec *)to = x; }
INLINE vec all(float x) { return (vec){0} + x; }

INLINE float sum_of(vec x)
{
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

/* a where `is` has all bits set, else b */
INLINE vec choose(ivec is, vec a, vec b) { return (vec)(((ivec)a & is) | ((ivec)b & ~is)); }

/* Cephes' expf, 2 ulp, of what is at most 0; 0 below -87, NaN of NaN. */
INLINE vec exp_of(vec x)
{
    ivec is_low = x < -87.0f;
    x = choose(is_low, all(0), x);
    vec k = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f; /* rounded to an integer */
    vec r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = (__builtin_convertvector(k, ivec) + 127) << 23;
    return choose(is_low, all(0), p * (vec)power);
}
