/* Products of matrices, by tiles that registers hold: rows of scalars times rows of vectors. And what
   brings matrices into the shape for it. */

#include "vectors.h"

/* Rows and vectors of a product's tile: as many as registers hold. */
#if LANES == 16
#define HEIGHT 12
#define WIDTH 2
#elif LANES == 8
#define HEIGHT 6
#define WIDTH 2
#else
#define HEIGHT 6
#define WIDTH 4
#endif
#define BLOCK (WIDTH * LANES)

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long most(long a, long b) { return a > b ? a : b; }
INLINE long up(long n) { return (n + BLOCK - 1) / BLOCK * BLOCK; }

/* C[i] = sum_x A[i a_row + x a_inner] B[x b_inner], or added to it: M rows of W vectors. */
INLINE void tile(int M, int W, int add, long n, const float *A, long a_row, long a_inner,
                 const float *B, long b_inner, float *C, long c_row)
{
    vec sum[HEIGHT][WIDTH];
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int w = 0; w < W; w++)
            sum[i][w] = add ? load(C + i * c_row + w * LANES) : all(0);
    for (long x = 0; x < n; x++) {
        vec b[WIDTH];
        UNROLL for (int w = 0; w < W; w++) b[w] = load(B + x * b_inner + w * LANES);
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int w = 0; w < W; w++) sum[i][w] += A[i * a_row + x * a_inner] * b[w];
    }
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int w = 0; w < W; w++) store(C + i * c_row + w * LANES, sum[i][w]);
}

#define TILE(M, W) tile(M, W, add, n, A, a_row, a_inner, B, b_inner, C + c, c_row)
#define TILES(M) case M: if (W == 1) TILE(M, 1); else TILE(M, WIDTH); break;

/* The same for any number of rows, and of columns divisible by LANES. Blocks of columns of B are
   b_block floats apart: BLOCK in a matrix, dim BLOCK in a transposed one. */
INLINE void product_of(int add, long rows, long columns, long n, const float *A, long a_row,
                       long a_inner, const float *B0, long b_inner, long b_block, float *C,
                       long c_row)
{
    for (; rows > 0; rows -= HEIGHT, A += HEIGHT * a_row, C += HEIGHT * c_row) {
        const float *B = B0;
        for (long c = 0; c < columns; c += BLOCK, B += b_block) {
            int W = columns - c < BLOCK ? 1 : WIDTH;
            switch (least(rows, HEIGHT)) {
                TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
#if HEIGHT == 12
                TILES(7) TILES(8) TILES(9) TILES(10) TILES(11) TILES(12)
#endif
            }
        }
    }
}

static void multiply(long rows, long columns, long n, const float *A, long a_row, const float *B,
                     long b_inner, long b_block, float *C, long c_row)
{
    product_of(0, rows, columns, n, A, a_row, 1, B, b_inner, b_block, C, c_row);
}

static void multiply_add(long rows, long columns, long n, const float *A, long a_row, long a_inner,
                         const float *B, long b_inner, float *C, long c_row)
{
    product_of(1, rows, columns, n, A, a_row, a_inner, B, b_inner, BLOCK, C, c_row);
}

/* Exchange blocks of S x S of a square, whose sizes are all powers of two: that transposes it. */
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#define UNPACK(...) __VA_ARGS__
#define EXCHANGE(S, LOW, HIGH)                             \
    UNROLL for (int i = 0; i < LANES; i++) if (!(i & S)) { \
        vec a = x[i], b = x[i + S];                        \
        x[i] = SHUFFLE(a, b, UNPACK LOW);                  \
        x[i + S] = SHUFFLE(a, b, UNPACK HIGH);             \
    }
#if LANES == 16
#define EXCHANGES \
    EXCHANGE(1, (0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30), \
             (1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)) \
    EXCHANGE(2, (0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29), \
             (2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)) \
    EXCHANGE(4, (0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27), \
             (4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)) \
    EXCHANGE(8, (0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23), \
             (8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#elif LANES == 8
#define EXCHANGES \
    EXCHANGE(1, (0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15)) \
    EXCHANGE(2, (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)) \
    EXCHANGE(4, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
#else
#define EXCHANGES \
    EXCHANGE(1, (0, 4, 2, 6), (1, 5, 3, 7)) \
    EXCHANGE(2, (0, 1, 4, 5), (2, 3, 6, 7))
#endif

INLINE void transpose_square(long rows, const float *from, long from_row, float *to, long to_row)
{
    vec x[LANES];
    UNROLL for (int i = 0; i < LANES; i++) x[i] = i < rows ? load(from + i * from_row) : all(0);
    EXCHANGES
    UNROLL for (int i = 0; i < LANES; i++) store(to + i * to_row, x[i]);
}

/* x[n][dim] to blocks [dim][BLOCK], the last one filled with zeros. Meanwhile memory is asked for
   what will be read next: as many floats from `soon` on, and from `later` on. */
static void transpose(long n, long dim, const float *from, long from_row, float *to,
                      const float *soon, const float *later)
{
    for (long t = 0; t < n; t += BLOCK, to += dim * BLOCK) {
        for (long x = t; x < least(t + BLOCK, n); x++)
            for (long d = 0; d < dim; d += LANES) {
                __builtin_prefetch(soon + x * from_row + d);
                __builtin_prefetch(later + x * from_row + d);
            }
        for (long c = 0; c < BLOCK; c += LANES)
            for (long d = 0; d < dim; d += LANES) {
                const float *x = from + (t + c) * from_row + d;
                float *into = to + d * BLOCK + c;
                if (n - t - c >= LANES) transpose_square(LANES, x, from_row, into, BLOCK);
                else transpose_square(n - t - c, x, from_row, into, BLOCK);
            }
    }
}

