/* What a learning pass computes row by row between its products, each in one pass over memory: RMS norms, SwiGLU,
 * rotary embeddings and the softmax over words. Numbers in between are float32; no sum depends on the number of
 * threads. `half`: the tensors are bfloat16 and not float32. */
#include <math.h>

#include "tiles.h"

/* out = w y with y = x r, r = 1 / sqrt(mean(x^2) + eps); or (1 + w) y, which is rounded once. */
INLINE void norm_of(const void *x, const void *w, void *out, float *r, long size, float eps, int plus_one, int half) {
    v16 squares[4] = {same(0), same(0), same(0), same(0)};
    for (long d = 0; d < size; d += LANES) {
        v16 v = load(x, d, size - d, half);
        squares[d / LANES % 4] += v * v;
    }
    *r = 1 / sqrtf(sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)size + eps);
    for (long d = 0; d < size; d += LANES) {
        v16 y = load(x, d, size - d, half) * same(*r), factor = load(w, d, size - d, half);
        store(out, d, plus_one ? y * (same(1) + factor) : rounded(y, half) * factor, size - d, half);
    }
}
/* Rows lie in groups of `group`, side by side in each; from one group to the next there are `ldx` numbers. */
INLINE long place(long i, long group, long ldx, long size) { return i / group * ldx + i % group * size; }
void learn_norm(const void *x, long ldx, long n, long group, const void *w, void *out, float *r, long size, float eps,
                int plus_one, int half, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long i = 0; i < n; i++) {
        const void *from = at(x, place(i, group, ldx, size), half);
        if (half) norm_of(from, w, (void *)at(out, i * size, 1), r + i, size, eps, plus_one, 1);
        else norm_of(from, w, (void *)at(out, i * size, 0), r + i, size, eps, plus_one, 0);
    }
}

/* dx = r (w g - y mean(w g y)) */
INLINE void norm_backward_of(const void *x, const void *w, const void *grad, void *dx, float r, long size,
                             float one, int half) {
    v16 both[2] = {same(0), same(0)};
    for (long d = 0; d < size; d += LANES) {
        long n = size - d;
        both[d / LANES % 2] += load(x, d, n, half) * load(grad, d, n, half) * (same(one) + load(w, d, n, half));
    }
    v16 mean = same(sum(both[0] + both[1]) * r * r / (float)size);
    for (long d = 0; d < size; d += LANES) {
        long n = size - d;
        v16 onto = load(grad, d, n, half) * (same(one) + load(w, d, n, half));
        store(dx, d, (onto - load(x, d, n, half) * mean) * same(r), n, half);
    }
}
void learn_norm_backward(const void *x, long ldx, long n, long group, const void *w, const void *grad, long ldg,
                         long grad_group, void *dx, const float *r, long size, int plus_one, int half, int threads) {
    float one = plus_one ? 1 : 0;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long i = 0; i < n; i++) {
        const void *from = at(x, place(i, group, ldx, size), half);
        const void *onto = at(grad, place(i, grad_group, ldg, size), half);
        void *to = (void *)at(dx, i * size, half);
        if (half) norm_backward_of(from, w, onto, to, r[i], size, one, 1);
        else norm_backward_of(from, w, onto, to, r[i], size, one, 0);
    }
}

/* out = w y silu(gate), y = x r as above, and backward; rows lie side by side. */
INLINE void gated_norm_of(const void *x, const void *gate, const void *w, void *out, float *r, long size, float eps,
                          int half) {
    v16 squares = same(0);
    for (long d = 0; d < size; d += LANES) {
        v16 v = load(x, d, size - d, half);
        squares += v * v;
    }
    *r = 1 / sqrtf(sum(squares) / (float)size + eps);
    for (long d = 0; d < size; d += LANES) {
        long n = size - d;
        v16 y = rounded(load(x, d, n, half) * same(*r), half), z = load(gate, d, n, half);
        store(out, d, rounded(y * load(w, d, n, half), half) * z * logistic(z), n, half);
    }
}
void learn_gated_norm(const void *x, const void *gate, long n, const void *w, void *out, float *r, long size, float eps,
                      int half, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long i = 0; i < n; i++) {
        const void *from = at(x, i * size, half), *by = at(gate, i * size, half);
        if (half) gated_norm_of(from, by, w, (void *)at(out, i * size, 1), r + i, size, eps, 1);
        else gated_norm_of(from, by, w, (void *)at(out, i * size, 0), r + i, size, eps, 0);
    }
}
INLINE void gated_norm_backward_of(const void *x, const void *gate, const void *w, const void *grad, void *dx,
                                   void *dgate, float r, long size, int half) {
    v16 both = same(0);
    for (long d = 0; d < size; d += LANES) {
        long n = size - d;
        v16 z = load(gate, d, n, half), share = logistic(z), y = load(x, d, n, half);
        v16 onto = load(grad, d, n, half) * load(w, d, n, half);
        both += onto * z * share * y;
        store(dgate, d, onto * y * same(r) * share * (same(1) + z * (same(1) - share)), n, half);
    }
    v16 mean = same(sum(both) * r * r / (float)size);
    for (long d = 0; d < size; d += LANES) {
        long n = size - d;
        v16 z = load(gate, d, n, half), onto = load(grad, d, n, half) * load(w, d, n, half) * z * logistic(z);
        store(dx, d, (onto - load(x, d, n, half) * mean) * same(r), n, half);
    }
}
void learn_gated_norm_backward(const void *x, const void *gate, long n, const void *w, const void *grad, void *dx,
                               void *dgate, const float *r, long size, int half, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long i = 0; i < n; i++) {
        const void *from = at(x, i * size, half), *by = at(gate, i * size, half), *onto = at(grad, i * size, half);
        void *to = (void *)at(dx, i * size, half), *to_gate = (void *)at(dgate, i * size, half);
        if (half) gated_norm_backward_of(from, by, w, onto, to, to_gate, r[i], size, 1);
        else gated_norm_backward_of(from, by, w, onto, to, to_gate, r[i], size, 0);
    }
}

/* Rows `ld` numbers apart. While one is computed the next one comes into the cache: these passes wait for memory, and
 * a row is too short for the processor to foresee the next. */
typedef struct {
    const void *p;
    long ld;
} Rows;
INLINE void fetch_next(Rows rows, long d, int half) { __builtin_prefetch(at(rows.p, rows.ld + d, half)); }
INLINE Rows row_of(Rows rows, long i, int half) { return (Rows){at(rows.p, i * rows.ld, half), rows.ld}; }

/* out = gate / (1 + e^-gate) up */
INLINE void swiglu_of(Rows gate, Rows up, Rows out, long size, int half) {
    for (long d = 0; d < size; d += LANES) {
        fetch_next(gate, d, half), fetch_next(up, d, half), fetch_next(out, d, half);
        v16 g = load(gate.p, d, size - d, half);
        store((void *)out.p, d, g * logistic(g) * load(up.p, d, size - d, half), size - d, half);
    }
}
void learn_swiglu(const void *gate, long ldg, const void *up, long ldu, long n, long size, void *out, int half,
                  int threads) {
    Rows gates = {gate, ldg}, ups = {up, ldu}, outs = {out, size};
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long i = 0; i < n; i++) {
        Rows g = row_of(gates, i, half), u = row_of(ups, i, half), to = row_of(outs, i, half);
        if (half) swiglu_of(g, u, to, size, 1);
        else swiglu_of(g, u, to, size, 0);
    }
}

/* With s = 1 / (1 + e^-gate): d gate = grad up s (1 + gate (1 - s)), d up = grad gate s; one behind the other. */
INLINE void swiglu_backward_of(Rows gate, Rows up, Rows grad, Rows dgate, Rows dup, long size, int half) {
    for (long d = 0; d < size; d += LANES) {
        fetch_next(gate, d, half), fetch_next(up, d, half), fetch_next(grad, d, half);
        fetch_next(dgate, d, half), fetch_next(dup, d, half);
        long n = size - d;
        v16 g = load(gate.p, d, n, half), onto = load(grad.p, d, n, half), s = logistic(g);
        store((void *)dgate.p, d, onto * load(up.p, d, n, half) * s * (same(1) + g * (same(1) - s)), n, half);
        store((void *)dup.p, d, onto * g * s, n, half);
    }
}
void learn_swiglu_backward(const void *gate, long ldg, const void *up, long ldu, const void *grad, long ldo, long n,
                           long size, void *both, int half, int threads) {
    Rows gates = {gate, ldg}, ups = {up, ldu}, grads = {grad, ldo}, outs = {both, 2 * size};
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long i = 0; i < n; i++) {
        Rows g = row_of(gates, i, half), u = row_of(ups, i, half), onto = row_of(grads, i, half);
        Rows dgate = row_of(outs, i, half), dup = {at(dgate.p, size, half), dgate.ld};
        if (half) swiglu_backward_of(g, u, onto, dgate, dup, size, 1);
        else swiglu_backward_of(g, u, onto, dgate, dup, size, 0);
    }
}

/* (a, b) -> (a cos - b sin, b cos' + a sin'), the two halves of a head; backward: the transposed. */
INLINE void rotary_of(const void *x, const void *cosine, const void *sine, void *out, long size, int backward,
                      int half) {
    long middle = size / 2;
    for (long d = 0; d < middle; d += LANES) {
        long n = middle - d;
        v16 a = load(x, d, n, half), b = load(x, middle + d, n, half);
        v16 c0 = load(cosine, d, n, half), c1 = load(cosine, middle + d, n, half);
        v16 s0 = load(sine, d, n, half), s1 = load(sine, middle + d, n, half);
        store(out, d, backward ? a * c0 + b * s1 : a * c0 - b * s0, n, half);
        store(out, middle + d, backward ? b * c1 - a * s0 : b * c1 + a * s1, n, half);
    }
}
void learn_rotary(const void *x, long head, long token, long heads, long n, long size, const void *cosine,
                  const void *sine, void *out, int backward, int half, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long i = 0; i < n; i++)
        for (long h = 0; h < heads; h++) {
            const void *from = at(x, h * head + i * token, half);
            const void *c = at(cosine, i * size, half), *s = at(sine, i * size, half);
            void *to = (void *)at(out, (i * heads + h) * size, half);
            if (half) rotary_of(from, c, s, to, size, backward, 1);
            else rotary_of(from, c, s, to, size, backward, 0);
        }
}

/* A word of probability 0 has a log-probability of -inf at worst; p log p is then 0, not NaN. */
INLINE v16 bounded(v16 x) { return greater(same(-3.4e38f), x); }

#define STRETCH (64 * LANES) /* words whose sum is float32; the sum of those sums is double */

/* Softmax of scale times a row: log-probability of the target, entropy; then the probabilities in the row's place, and
 * their products with the shifted logits. */
INLINE void softmax_of(void *row, long words, long target, float scale, float *logprob, float *entropy, float *h,
                       void *surprise, int probabilities, int half) {
    v16 most = same(-INFINITY), factor = same(scale);
    long whole = words / LANES * LANES;
    for (long v = 0; v < whole; v += LANES) most = greater(load(row, v, LANES, half) * factor, most);
    float top = largest(most);
    for (long v = whole; v < words; v++) {
        float x = number(row, v, half) * scale;
        top = x > top ? x : top;
    }
    double total = 0, mixed = 0;
    for (long first = 0; first < words; first += STRETCH) {
        v16 sums = same(0), products = same(0);
        for (long v = first; v < least(words, first + STRETCH); v += LANES) {
            v16 shifted = load(row, v, words - v, half) * factor - same(top), e = exponential(shifted);
            if (words - v < LANES)
                for (long i = words - v; i < LANES; i++) e[i] = shifted[i] = 0;
            sums += e;
            products += e * bounded(shifted);
        }
        total += sum(sums), mixed += sum(products);
    }
    double log_total = log(total);
    *logprob = (float)((double)(number(row, target, half) * scale - top) - log_total);
    *h = (float)(-mixed / total);
    *entropy = (float)(log_total - mixed / total);
    if (!probabilities) return;
    v16 inverse = same((float)(1 / total));
    for (long v = 0; v < words; v += LANES) {
        v16 shifted = load(row, v, words - v, half) * factor - same(top), p = exponential(shifted) * inverse;
        store(row, v, p, words - v, half);
        if (surprise) store(surprise, v, p * bounded(shifted), words - v, half);
    }
}
void learn_softmax(void *rows, long n, long words, const long *targets, const float *scales, float *logprobs,
                   float *entropies, float *h, void *surprises, int probabilities, int half, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long i = 0; i < n; i++) {
        void *row = (void *)at(rows, i * words, half);
        void *surprise = surprises ? (void *)at(surprises, i * words, half) : 0;
        float *logprob = logprobs + i, *entropy = entropies + i;
        if (half) softmax_of(row, words, targets[i], scales[i], logprob, entropy, h + i, surprise, probabilities, 1);
        else softmax_of(row, words, targets[i], scales[i], logprob, entropy, h + i, surprise, probabilities, 0);
    }
}
