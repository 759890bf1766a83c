/* A causal convolution of four taps for each channel, and SiLU: before recurrences. Results are rounded as torch does,
 * behind the convolution and behind SiLU. `half`: the tensors are bfloat16 and not float32; the weights never are. */
#include <stdlib.h>

#include "tiles.h"

#define TAPS 4
#define BLOCK 1024 /* channels of a task, whose last tokens stay in the cache */

/* Taps of 16 channels before the sum; tokens before the first are 0. */
INLINE v16 mixed(const void *x, long ld, long token, long d, const float *weight, long channels, int half) {
    v16 both = same(0);
    for (long tap = 0; tap < TAPS; tap++) {
        long from = token - TAPS + 1 + tap;
        if (from >= 0)
            both += load((const char *)x, from * ld + d, LANES, half) * load_f32(weight + tap * channels + d);
    }
    return rounded(both, half);
}

typedef struct {
    const void *x; /* [rows][tokens][channels], distances in numbers */
    long ldrow, ldtoken;
    const float *weight; /* [TAPS][channels] */
    void *out;           /* [rows][tokens][channels] */
    const void *grad;
    long grad_row, grad_token;
    void *dx; /* as out */
    long rows, tokens, channels;
    int half, threads;
} Conv;

INLINE void forward(const Conv *c, const void *x, void *out, long first, long end, int half) {
    for (long t = 0; t < c->tokens; t++)
        for (long d = first; d < end; d += LANES) {
            v16 pre = mixed(x, c->ldtoken, t, d, c->weight, c->channels, half);
            store(out, t * c->channels + d, pre * logistic(pre), LANES, half);
        }
}

INLINE void backward(const Conv *c, const void *x, const void *grad, void *dx, long first, long end, int half) {
    float last[TAPS][BLOCK]; /* gradients before SiLU, by token modulo TAPS */
    memset(last, 0, sizeof last);
    for (long t = 0; t < c->tokens + TAPS - 1; t++) {
        float *own = last[t % TAPS];
        for (long d = first; d < end; d += LANES) {
            v16 onto = same(0);
            if (t < c->tokens) {
                v16 pre = mixed(x, c->ldtoken, t, d, c->weight, c->channels, half), share = logistic(pre);
                onto = load(grad, t * c->grad_token + d, LANES, half);
                onto = onto * share * (same(1) + pre * (same(1) - share));
            }
            store_f32(own + d - first, onto);
        }
        long token = t - TAPS + 1;
        if (token < 0) continue;
        for (long d = first; d < end; d += LANES) {
            v16 both = same(0);
            for (long tap = 0; tap < TAPS; tap++)
                both += load_f32(last[(t - tap) % TAPS] + d - first) * load_f32(c->weight + tap * c->channels + d);
            store(dx, token * c->channels + d, both, LANES, half);
        }
    }
}

void short_conv(const Conv *c, int back) {
    long blocks = (c->channels + BLOCK - 1) / BLOCK, tasks = c->rows * blocks;
#pragma omp parallel for num_threads(c->threads) if (c->threads > 1)
    for (long task = 0; task < tasks; task++) {
        long row = task / blocks, first = task % blocks * BLOCK, end = least(first + BLOCK, c->channels);
        const void *x = at(c->x, row * c->ldrow, c->half);
        long own = row * c->tokens * c->channels;
        if (!back) {
            void *out = (void *)at(c->out, own, c->half);
            if (c->half) forward(c, x, out, first, end, 1);
            else forward(c, x, out, first, end, 0);
        } else {
            const void *grad = at(c->grad, row * c->grad_row, c->half);
            void *dx = (void *)at(c->dx, own, c->half);
            if (c->half) backward(c, x, grad, dx, first, end, 1);
            else backward(c, x, grad, dx, first, end, 0);
        }
    }
}

/* One token; `state` [rows][channels][TAPS] has the last ones, and takes up this one. */
void short_conv_step(const void *x, long ldx, void *state, const float *weight, void *out, long rows, long channels,
                     int half) {
    for (long row = 0; row < rows; row++)
        for (long d = 0; d < channels; d += LANES) {
            v16 taps[TAPS];
            long place = row * channels + d;
            if (half) {
                uint64_t *own = (uint64_t *)state + place; /* the four of a channel are one number */
                const bf16 *now = (const bf16 *)x + row * ldx + d;
                for (int n = 0; n < LANES; n++) own[n] = own[n] >> 16 | (uint64_t)now[n] << 48;
                for (int tap = 0; tap < TAPS; tap++) {
                    u16 bits;
                    for (int n = 0; n < LANES; n++) bits[n] = (uint32_t)(own[n] >> (16 * tap)) << 16;
                    taps[tap] = (v16)bits;
                }
            } else {
                float *own = (float *)state + place * TAPS;
                const float *now = (const float *)x + row * ldx + d;
                for (int n = 0; n < LANES; n++) {
                    for (int tap = 0; tap + 1 < TAPS; tap++) own[n * TAPS + tap] = own[n * TAPS + tap + 1];
                    own[n * TAPS + TAPS - 1] = now[n];
                }
                for (int tap = 0; tap < TAPS; tap++)
                    for (int n = 0; n < LANES; n++) taps[tap][n] = own[n * TAPS + tap];
            }
            v16 pre = same(0);
            for (int tap = 0; tap < TAPS; tap++) pre += taps[tap] * load_f32(weight + tap * channels + d);
            pre = rounded(pre, half);
            store(out, place, pre * logistic(pre), LANES, half);
        }
}
