/* Calls every kernel that a processor without AVX-512 has, on made-up numbers, and writes what comes out to stdout:
 * name, count, float32 numbers. So builds for different processors can be compared. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "low_rank.h"

static uint32_t state = 1;
static float number(void) {
    state = state * 1664525u + 1013904223u;
    return ((float)(state >> 8) / 8388608.0f - 1.0f) * 1.5f;
}
static void write_out(const char *name, const float *p, long n) {
    printf("%s %ld\n", name, n);
    fwrite(p, sizeof *p, n, stdout);
    putchar('\n');
}
static float *floats(long n) {
    float *p = malloc(n * sizeof *p);
    for (long i = 0; i < n; i++) p[i] = number();
    return p;
}
static int64_t *counts(int n, const int *from) {
    int64_t *p = malloc(n * sizeof *p);
    for (int i = 0; i < n; i++) p[i] = from[i];
    return p;
}
#define COUNTS(n, ...) counts(n, (const int[]){__VA_ARGS__})

void sample(const void *, long, long, long, const float *, const float *, int64_t *, float *, float *, int, int);
void learn_norm(const void *, long, long, long, const void *, void *, float *, long, float, int, int, int);
void learn_norm_backward(const void *, long, long, long, const void *, const void *, long, long, void *, const float *,
                         long, int, int, int);
void learn_swiglu(const void *, long, const void *, long, long, long, void *, int, int);
void learn_swiglu_backward(const void *, long, const void *, long, const void *, long, long, long, void *, int, int);
void learn_rotary(const void *, long, long, long, long, long, const void *, const void *, void *, int, int, int);
void learn_softmax(void *, long, long, const long *, const float *, float *, float *, float *, void *, int, int, int);

typedef struct {
    const void *data;
    long head, token;
} Heads;
typedef struct {
    Heads q, k, v, past_k, past_v, out, grad, dq, dk, dv;
    float *lse;
    const long *families, *rows;
    long count, heads, kv_heads, tokens, size;
    float scale;
    int half, threads;
} Pass;
void learn_attention(const Pass *, int);
void learn_gated_norm(const void *, const void *, long, const void *, void *, float *, long, float, int, int);
void learn_gated_norm_backward(const void *, const void *, long, const void *, const void *, void *, void *,
                               const float *, long, int, int);

typedef struct {
    const void *data;
    long row, token, head;
} Part;
typedef struct {
    Part q, k, v, g, beta;
    const float *state;
    void *out;
    float *kept;
    Part grad;
    const float *grad_kept;
    void *dq, *dk, *dv;
    float *dg, *dbeta, *dstate;
    long rows, tokens, heads, size, width;
    int normed, half, half_beta, threads;
} Delta;
void delta_step(const Delta *);
void delta_chunks(const Delta *, int);

typedef struct {
    const void *x;
    long ldrow, ldtoken;
    const float *weight;
    void *out;
    const void *grad;
    long grad_row, grad_token;
    void *dx;
    long rows, tokens, channels;
    int half, threads;
} Conv;
void short_conv(const Conv *, int);
void short_conv_step(const void *, long, void *, const float *, void *, long, long, int);

#define KERNELS(T, F, HALF)                                                                                            \
    void rms_norm_##F(const T *, const float *, long, long, float, T *, int);                                          \
    void silu_product_##F(const T *, long, long, T *, int);                                                            \
    void attend_##F(const T *, const T *, const T *, const float *, float, long, long, long, long, const T *,          \
                    const T *, long, long, const int64_t *, const int64_t *, T *, T *, long, long, long, float, float, \
                    T *, int);                                                                                         \
    void low_rank_up_##F(const LowRank *, T *, long, int);                                                             \
    void low_rank_backward_##F(const T *, long, const T *, long, long, const T *, long, const LowRank *,               \
                               const float *, const char *, float *, const int64_t *, const int64_t *,                 \
                               const int64_t *, long, int);                                                            \
    static T *made_##F(long n) {                                                                                       \
        T *p = malloc(n * sizeof *p);                                                                                  \
        for (long i = 0; i < n; i++) p[i] = to_##F(number());                                                          \
        return p;                                                                                                      \
    }                                                                                                                  \
    static void show_##F(const char *name, const T *p, long n) {                                                       \
        float *all = malloc(n * sizeof *all);                                                                          \
        for (long i = 0; i < n; i++) all[i] = from_##F(p[i]);                                                          \
        write_out(name, all, n);                                                                                       \
    }                                                                                                                  \
    static void decode_##F(void) {                                                                                     \
        enum { ROWS = 3, HEADS = 6, KV = 2, DIM = 20, ROOM = 48, NEAR = 32 };                                          \
        T *out = made_##F(ROWS * 70), *x = made_##F(ROWS * 70);                                                        \
        rms_norm_##F(x, floats(70), ROWS, 70, 1e-6f, out, 1);                                        \
        show_##F("rms_norm", out, ROWS * 70);                                                                          \
        silu_product_##F(made_##F(ROWS * 140), ROWS, 70, out, 1);                                                      \
        show_##F("silu_product", out, ROWS * 70);                                                                      \
        for (int kind = 0; kind < 3; kind++) { /* plain; normed; a window and a bound of the scores */                 \
            T *to = made_##F(ROWS * HEADS * DIM), *qkv = made_##F(ROWS * (HEADS + 2 * KV) * DIM);                      \
            T *cosine = made_##F(ROWS * DIM), *sine = made_##F(ROWS * DIM);                                            \
            T *far_k = made_##F(2 * KV * DIM * ROOM), *far_v = made_##F(2 * KV * 40 * DIM);                            \
            T *near_k = made_##F(ROWS * KV * NEAR * DIM), *near_v = made_##F(ROWS * KV * NEAR * DIM);                  \
            float *norms = kind == 1 ? floats((HEADS + KV) * DIM) : NULL;                                              \
            attend_##F(qkv, cosine, sine, norms, 1e-6f, ROWS, HEADS, KV, DIM, far_k, far_v, ROOM, 40,                  \
                       COUNTS(2, 40, 17), COUNTS(3, 0, 1, 1), near_k, near_v, NEAR, 19, kind == 2 ? 25 : 0, 0.3f,      \
                       kind == 2 ? 5.0f : 0.0f, to, 1);                                  \
            show_##F("attend", to, ROWS * HEADS * DIM);                                                                \
        }                                                                                                              \
    }                                                                                                                  \
    static void learn_##F(void) {                                                                                      \
        enum { N = 5, SIZE = 52, HEADS = 4, KV = 2, DIM = 20, TOKENS = 16, WORDS = 301 };                              \
        T *x = made_##F(N * SIZE), *w = made_##F(SIZE), *grad = made_##F(N * SIZE), *out = made_##F(2 * N * SIZE);     \
        float r[N];                                                                                                    \
        for (int one = 0; one < 2; one++) {                                                                            \
            learn_norm(x, SIZE, N, 1, w, out, r, SIZE, 1e-6f, one, HALF, 1);                                           \
            show_##F("norm", out, N * SIZE);                                                                           \
            learn_norm_backward(x, SIZE, N, 1, w, grad, SIZE, 1, out, r, SIZE, one, HALF, 1);                          \
            show_##F("norm_backward", out, N * SIZE);                                                                  \
        }                                                                                                              \
        T *up = made_##F(N * SIZE);                                                                                    \
        learn_swiglu(x, SIZE, up, SIZE, N - 1, SIZE, out, HALF, 1);                                                    \
        show_##F("swiglu", out, (N - 1) * SIZE);                                                                       \
        learn_swiglu_backward(x, SIZE, up, SIZE, grad, SIZE, N - 1, SIZE, out, HALF, 1);                               \
        show_##F("swiglu_backward", out, 2 * (N - 1) * SIZE);                                                          \
        long part = HEADS * TOKENS * DIM;                                                                              \
        T *to = made_##F(part);                                                                                        \
        for (int back = 0; back < 2; back++) {                                                                         \
            T *from = made_##F(part), *cosine = made_##F(TOKENS * DIM), *sine = made_##F(TOKENS * DIM);                \
            learn_rotary(from, TOKENS * DIM, DIM, HEADS, TOKENS, DIM, cosine, sine, to, back, HALF, 1);                                                   \
            show_##F("rotary", to, part);                                                                              \
        }                                                                                                              \
        T *rows = made_##F(N * WORDS), *surprises = made_##F(N * WORDS);                                               \
        long targets[N] = {0, 3, 299, 300, 17};                                                                        \
        float scales[N] = {1, 2, 0.5f, 1, 1}, logprobs[N], entropies[N], h[N];                                         \
        learn_softmax(rows, N, WORDS, targets, scales, logprobs, entropies, h, surprises, 1, HALF, 1);                 \
        show_##F("softmax", rows, N * WORDS), show_##F("surprises", surprises, N * WORDS);                             \
        write_out("logprobs", logprobs, N), write_out("entropies", entropies, N);                                      \
        long families[8] = {0, 5, 0, 0, 16, 0, 0, 2}, own[4] = {5, 7, 12, 4}, kv = KV * TOKENS * DIM;                  \
        float lse[HEADS * TOKENS];                                                                                     \
        T *q = made_##F(part), *k = made_##F(kv), *v = made_##F(kv), *onto = made_##F(part), *at = made_##F(part);     \
        T *dq = made_##F(part), *dk = made_##F(kv), *dv = made_##F(kv);                                                \
        Pass pass = {{q, TOKENS * DIM, DIM}, {k, TOKENS * DIM, DIM}, {v, TOKENS * DIM, DIM}, {k, 0, 0}, {v, 0, 0},     \
                     {at, TOKENS * DIM, DIM}, {onto, TOKENS * DIM, DIM}, {dq, TOKENS * DIM, DIM},                      \
                     {dk, TOKENS * DIM, DIM}, {dv, TOKENS * DIM, DIM}, lse, families, own, 1, HEADS, KV, TOKENS, DIM,  \
                     0.2f, HALF, 1};                                                                                   \
        learn_attention(&pass, 0);                                                                                     \
        show_##F("attention", at, part), write_out("lse", lse, HEADS * TOKENS);                                        \
        learn_attention(&pass, 1);                                                                                     \
        show_##F("dq", dq, part), show_##F("dk", dk, kv), show_##F("dv", dv, kv);                                      \
    }                                                                                                                  \
    static void recurrence_##F(void) {                                                                                 \
        enum { ROWS = 2, TOKENS = 70, HEADS = 2, SIZE = 16, WIDTH = 48, ALL = ROWS * TOKENS * HEADS };                 \
        enum { STATE = ROWS * HEADS * SIZE * WIDTH, CHANNELS = 32, TAPS = 4, MIXED = ROWS * TOKENS * CHANNELS };       \
        float *g = floats(ALL), *kept = floats(STATE), *dg = floats(ALL), *dbeta = floats(ALL), *ds = floats(STATE);   \
        for (long i = 0; i < ALL; i++) g[i] = -g[i] * g[i];                                                            \
        T *out = made_##F(ALL * WIDTH), *dq = made_##F(ALL * SIZE), *dk = made_##F(ALL * SIZE);                        \
        T *dv = made_##F(ALL * WIDTH);                                                                                 \
        long small = TOKENS * HEADS * SIZE, wide = TOKENS * HEADS * WIDTH, one = TOKENS * HEADS;                       \
        Delta pass = {{made_##F(ALL * SIZE), small, HEADS * SIZE, SIZE}, {made_##F(ALL * SIZE), small, HEADS * SIZE, SIZE},\
                      {made_##F(ALL * WIDTH), wide, HEADS * WIDTH, WIDTH}, {g, one, HEADS, 1},                         \
                      {made_##F(ALL), one, HEADS, 1}, floats(STATE), out, kept,                                        \
                      {made_##F(ALL * WIDTH), wide, HEADS * WIDTH, WIDTH}, floats(STATE), dq, dk, dv, dg, dbeta, ds,   \
                      ROWS, TOKENS, HEADS, SIZE, WIDTH, 1, HALF, HALF, 1};                                             \
        delta_chunks(&pass, 0);                                                                                        \
        show_##F("delta", out, ALL * WIDTH), write_out("delta_state", kept, STATE);                                    \
        delta_chunks(&pass, 1);                                                                                        \
        show_##F("delta_dq", dq, ALL * SIZE), show_##F("delta_dk", dk, ALL * SIZE);                                    \
        show_##F("delta_dv", dv, ALL * WIDTH), write_out("delta_dg", dg, ALL);                                         \
        write_out("delta_dbeta", dbeta, ALL), write_out("delta_dstate", ds, STATE);                                    \
        delta_step(&pass);                                                                                             \
        show_##F("delta_step", out, ROWS * HEADS * WIDTH), write_out("delta_step_state", kept, STATE);                 \
        T *mixed = made_##F(MIXED), *dx = made_##F(MIXED), *last = made_##F(ROWS * CHANNELS * TAPS);                   \
        Conv conv = {mixed, TOKENS * CHANNELS, CHANNELS, floats(TAPS * CHANNELS), dx, mixed, TOKENS * CHANNELS, CHANNELS,\
                     dx, ROWS, TOKENS, CHANNELS, HALF, 1};                                                             \
        short_conv(&conv, 0);                                                                                          \
        show_##F("conv", dx, MIXED);                                                                                   \
        short_conv(&conv, 1);                                                                                          \
        show_##F("conv_backward", dx, MIXED);                                                                          \
        short_conv_step(mixed, CHANNELS, last, conv.weight, dx, ROWS, CHANNELS, HALF);                                 \
        show_##F("conv_step", dx, ROWS * CHANNELS), show_##F("conv_state", last, ROWS * CHANNELS * TAPS);              \
        float r[ROWS * TOKENS];                                                                                        \
        T *w = made_##F(CHANNELS), *gate = made_##F(MIXED), *dgate = made_##F(MIXED);                                  \
        learn_gated_norm(mixed, gate, ROWS * TOKENS, w, dx, r, CHANNELS, 1e-6f, HALF, 1);                              \
        show_##F("gated_norm", dx, MIXED);                                                                             \
        learn_gated_norm_backward(mixed, gate, ROWS * TOKENS, w, gate, dx, dgate, r, CHANNELS, HALF, 1);               \
        show_##F("gated_norm_dx", dx, MIXED), show_##F("gated_norm_dgate", dgate, MIXED);                              \
    }                                                                                                                  \
    static void adapters_##F(void) {                                                                                   \
        enum { ROWS = 11, IN = 37, OUT = 53, LD = 8 };                                                                 \
        const void *down[3] = {made_##F(5 * IN), NULL, made_##F(8 * IN)};                                              \
        const void *up[3] = {made_##F(3 * 33 + 2 * 20), NULL, made_##F(4 * 33 + 4 * 20)};                              \
        T *numbers = made_##F(ROWS * LD), *back = made_##F(ROWS * LD), *x = made_##F(ROWS * IN);                       \
        LowRank low = {3, 2, COUNTS(3, 5, 6, 11), COUNTS(9, 0, 3, 5, 0, 0, 0, 0, 4, 8), COUNTS(3, 0, 33, 53), down,    \
                       up, NULL, NULL, numbers, LD};                                                                   \
        memset(numbers, 0, ROWS * LD * sizeof *numbers), memset(back, 0, ROWS * LD * sizeof *back);                    \
        low_rank_down_##F(x, IN, IN, &low, 1);                                                                         \
        show_##F("low_rank_down", numbers, ROWS * LD);                                                                 \
        T *out = made_##F(ROWS * OUT);                                                                                 \
        low_rank_up_##F(&low, out, OUT, 1);                                                                            \
        show_##F("low_rank_up", out, ROWS * OUT);                                                                      \
        long first = 5 * IN + 3 * 33 + 2 * 20, all = first + 8 * IN + 4 * 33 + 4 * 20;                                 \
        float *grads = floats(all), factors[6] = {2, 2, 0, 0, 0.5f, 0.5f};                                             \
        char fresh[3] = {1, 0, 1};                                                                                     \
        low.numbers = back;                                                                                            \
        low_rank_backward_##F(made_##F(ROWS * OUT), OUT, x, IN, IN, numbers, LD, &low, factors, fresh, grads,          \
                              COUNTS(3, 0, 0, first),                                                                  \
                              COUNTS(6, 5 * IN, 5 * IN + 3 * 33, 0, 0, first + 8 * IN, first + 8 * IN + 4 * 33),       \
                              COUNTS(3, 0, -1, 5 * OUT), 13 * OUT, 1);                                                 \
        write_out("low_rank_gradients", grads, all), show_##F("low_rank_back", back, ROWS * LD);                       \
    }                                                                                                                  \
    static void draw_##F(void) {                                                                                       \
        enum { ROWS = 6, WORDS = 1147 };                                                                               \
        float t[ROWS] = {0, 1, 0.7f, 1, 1.3f, 0}, u[ROWS] = {0, 0.1f, 0.5f, 0.93f, 0.3f, 0.2f}, p[ROWS], all[ROWS];    \
        int64_t ids[ROWS];                                                                                             \
        sample(made_##F(ROWS * WORDS), WORDS, ROWS, WORDS, t, u, ids, p, all, HALF, 1);                                \
        float drawn[ROWS];                                                                                             \
        for (int i = 0; i < ROWS; i++) drawn[i] = (float)ids[i];                                                       \
        write_out("ids", drawn, ROWS), write_out("drawn", p, ROWS), write_out("totals", all, ROWS);                    \
    }

KERNELS(float, f32, 0)
KERNELS(bf16, bf16, 1)

int main(void) {
    decode_f32(), learn_f32(), recurrence_f32(), adapters_f32(), draw_f32();
    decode_bf16(), learn_bf16(), recurrence_bf16(), adapters_bf16(), draw_bf16();
    return 0;
}
