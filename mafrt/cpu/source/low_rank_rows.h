/* Included once for each number format: T, and OF(name) for the functions of that format. */

/* An adapter's weights as they are read here. a, b: [layers] A [ranks][size] and B [outputs][ranks]; scales: [layers];
 * down: A of all layers; up: B^T of each layer, scaled, one behind the other. */
void OF(low_rank_lay_out)(long layers, const int64_t *ranks, const int64_t *columns, long size, const float *const *a,
                          const float *const *b, const float *scales, T *down, T *up) {
    for (long l = 0; l < layers; l++) {
        long n = ranks[l + 1] - ranks[l], width = columns[l + 1] - columns[l];
        for (long i = 0; i < n * size; i += LANES, down += LANES)
            OF(store_some)(down, load_some_f32(a[l] + i, n * size - i), n * size - i);
        down += n * size - (n * size + LANES - 1) / LANES * LANES;
        for (long q = 0; q < n; q++, up += width)
            for (long c = 0; c < width; c += LANES) {
                float turned[LANES] = {0};
                for (long i = 0; i < LANES && c + i < width; i++) turned[i] = b[l][(c + i) * n + q] * scales[l];
                OF(store_some)(up + c, load_f32(turned), width - c);
            }
    }
}

/* up, as of `low_rank_lay_out`, in panels of PANEL outputs. Each has the ranks of the layers to which its outputs
 * belong, with zeros where a rank is another layer's, at the end of the outputs, and for a rank without its pair.
 * to: the panels one behind the other; for bfloat16 [ranks / 2][PANEL][2]. */
void OF(low_rank_panels)(long layers, const int64_t *ranks, const int64_t *columns, const T *up, T *to) {
    const long step = 1 + OF(PAIRED);
    for (long column = 0, width = columns[layers], from = 0; column < width; column += PANEL) {
        long last = least(column + PANEL, width), to_layer;
        for (; columns[from + 1] <= column; from++)
            up += (ranks[from + 1] - ranks[from]) * (columns[from + 1] - columns[from]);
        for (to_layer = from; columns[to_layer] < last; to_layer++) {}
        long begin = ranks[from] / step * step, end = (ranks[to_layer] + step - 1) / step * step;
        memset(to, 0, (end - begin) * PANEL * sizeof(T));
        const T *own = up;
        for (long l = from; l < to_layer; l++) {
            long outputs = columns[l + 1] - columns[l], stop = least(last, columns[l + 1]);
            for (long q = ranks[l]; q < ranks[l + 1]; q++, own += outputs) {
                T *line = to + (q - begin) / step * PANEL * step + (q - begin) % step;
                for (long c = column > columns[l] ? column : columns[l]; c < stop; c++)
                    line[(c - column) * step] = own[c - columns[l]];
            }
        }
        to += (end - begin) * PANEL;
    }
}

/* to[i][q] = sum over c < size of x[i][c] w[q][c], with a constant number of rows and ranks. What lies at `next` as the
 * weights do comes into the cache; NULL: nothing. */
INLINE void OF(dots_tile)(int rows, int ranks, const T *x, long ldx, const T *w, long ldw, long size, const T *next,
                          T *to, long ld) {
    v16 acc[DOTS][DOTS];
#pragma GCC unroll 4
    for (int i = 0; i < DOTS; i++)
#pragma GCC unroll 4
        for (int q = 0; q < DOTS; q++) acc[i][q] = same(0);
    long c = 0;
    for (; c + OF(WIDE) <= size; c += OF(WIDE)) {
        OF(wide) right[DOTS];
#pragma GCC unroll 4
        for (int q = 0; q < ranks; q++) right[q] = OF(load_wide)(w + q * ldw + c);
#pragma GCC unroll 4
        for (int q = 0; next && q < ranks; q++) __builtin_prefetch(next + q * ldw + c);
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            OF(wide) left = OF(load_wide)(x + i * ldx + c);
            HOLD(left);
#pragma GCC unroll 4
            for (int q = 0; q < ranks; q++) acc[i][q] = OF(add_products)(acc[i][q], left, right[q]);
        }
    }
    for (; c < size; c += LANES)
        for (int q = 0; q < ranks; q++) {
            v16 right = OF(load_some)(w + q * ldw + c, size - c);
            for (int i = 0; i < rows; i++) acc[i][q] += OF(load_some)(x + i * ldx + c, size - c) * right;
        }
    T sums[LANES];
    OF(store)(sums, sums_of_sixteen(acc));
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) memcpy(to + i * ld, sums + i * DOTS, ranks * sizeof(T));
}

/* The same for up to four rows and any number of ranks. What is fetched is the weights of the next ranks, and `next`
 * behind the last of them. */
static void OF(dots)(long rows, long ranks, const T *x, long ldx, const T *w, long ldw, long size, const T *next, T *to,
                     long ld) {
    for (long q = 0; q < ranks; q += DOTS) {
        const T *then = next && q + DOTS < ranks ? w + (q + DOTS) * ldw : next;
#define CASE(R, Q)                                                                                                     \
    case R * 8 + Q:                                                                                                    \
        OF(dots_tile)(R, Q, x, ldx, w + q * ldw, ldw, size, then, to + q, ld);                                         \
        break;
#define CASES(R) CASE(R, 1) CASE(R, 2) CASE(R, 3) CASE(R, 4)
        switch (rows * 8 + least(ranks - q, DOTS)) { CASES(1) CASES(2) CASES(3) CASES(4) }
#undef CASES
#undef CASE
    }
}

/* Behind an odd number of ranks stands a 0, since products in bfloat16 take them in pairs. */
INLINE void OF(even)(const LowRank *low, long ranks, long first, long last) {
    for (long i = first; ranks % 2 && ranks < low->ld && i < last; i++) ((T *)low->numbers)[i * low->ld + ranks] = 0;
}

/* numbers = x A^T. x: [rows][size]. */
void OF(low_rank_down)(const T *x, long ldx, long size, const LowRank *low, int threads) {
    /* One region for all segments: to begin one takes as long as a segment of few rows. */
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        long start = 0;
        for (long s = 0; s < low->segments; start = low->stops[s++]) {
            long last = low->stops[s], ranks = ranks_of(low, s);
            if (!ranks) continue;
            /* With few rows an adapter the time goes by waiting for its weights, of which each is read once. */
            const T *next = s + 1 < low->segments && ranks_of(low, s + 1) ? low->down[s + 1] : low->down[s];
#pragma omp for nowait
            for (long r = start; r < last; r += DOTS) {
                T *to = (T *)low->numbers + r * low->ld;
                long n = least(last - r, DOTS);
                OF(dots)(n, ranks, x + r * ldx, ldx, low->down[s], size, size, r == start ? next : NULL, to, low->ld);
                OF(even)(low, ranks, r, r + n);
            }
        }
    }
}

/* out[i] += numbers[i] up, a constant number of rows. */
INLINE void OF(up_tile)(int rows, const LowRank *low, long s, long first, T *out, long ldo) {
    const T *up = low->up[s];
    const int64_t *ranks = low->ranks + s * (low->layers + 1);
    const T *numbers = (const T *)low->numbers + first * low->ld;
    for (long l = 0; l < low->layers; l++) {
        long width = low->columns[l + 1] - low->columns[l];
        if (ranks[l] == ranks[l + 1]) continue;
        for (long c = low->columns[l]; c < low->columns[l + 1]; c += LANES) {
            long n = low->columns[l + 1] - c;
            T *to = out + first * ldo + c;
            v16 acc[DOTS];
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) acc[i] = OF(load_some)(to + i * ldo, n);
            for (long q = ranks[l]; q < ranks[l + 1]; q++) {
                v16 w = OF(load_some)(up + (q - ranks[l]) * width + c - low->columns[l], n);
#pragma GCC unroll 4
                for (int i = 0; i < rows; i++) acc[i] += same(OF(from)(numbers[i * low->ld + q])) * w;
            }
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) OF(store_some)(to + i * ldo, acc[i], n);
        }
        up += (ranks[l + 1] - ranks[l]) * width;
    }
}

/* out += numbers up, for products whose weights are not in panels. out: [rows][outputs]. */
void OF(low_rank_up)(const LowRank *low, T *out, long ldo, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        long start = 0;
        for (long s = 0; s < low->segments; start = low->stops[s++]) {
            long last = low->stops[s];
            if (!ranks_of(low, s)) continue;
#pragma omp for nowait
            for (long r = start; r < last; r += DOTS) {
                switch (least(last - r, DOTS)) {
                    case 1: OF(up_tile)(1, low, s, r, out, ldo); break;
                    case 2: OF(up_tile)(2, low, s, r, out, ldo); break;
                    case 3: OF(up_tile)(3, low, s, r, out, ldo); break;
                    default: OF(up_tile)(4, low, s, r, out, ldo);
                }
            }
        }
    }
}

/* to[q][c] = factor * sum over the rows of h[i][q] m[i][c], or += with `add`, for some ranks and up to 16 SUM_VECTORS
 * columns, of which `left` exist. */
INLINE void OF(sum_tile)(int ranks, int vectors, long rows, const T *h, long ldh, const T *m, long ldm, long left,
                         float factor, int add, float *to, long ldto) {
    v16 acc[SUM_RANKS][SUM_VECTORS];
#pragma GCC unroll 8
    for (int q = 0; q < ranks; q++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) acc[q][v] = same(0);
    for (long i = 0; i < rows; i++) {
        v16 right[SUM_VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) right[v] = OF(load_some)(m + i * ldm + v * LANES, left - v * LANES);
        /* The processor foresees rows, and this goes down columns: the next ones are fetched meanwhile. */
        for (int v = 0; v < vectors; v++) __builtin_prefetch(m + i * ldm + (vectors + v) * LANES);
#pragma GCC unroll 8
        for (int q = 0; q < ranks; q++) {
            v16 number = same(OF(from)(h[i * ldh + q]));
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) acc[q][v] += number * right[v];
        }
    }
#pragma GCC unroll 8
    for (int q = 0; q < ranks; q++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            float *at = to + q * ldto + v * LANES;
            long n = left - v * LANES;
            v16 sums = acc[q][v] * same(factor);
            store_some_f32(at, add ? load_some_f32(at, n) + sums : sums, n);
        }
}

#undef IN_PAIRS
#if OF(PAIRED) && defined(HAS_BF16)
#define IN_PAIRS 1
/* The same for 32 columns, two rows in one step: `pairs` has the numbers of rows 2 i and 2 i + 1 side by side. */
INLINE void sum_pairs(int ranks, long rows, const int32_t *pairs, long ldp, const bf16 *m, long ldm, float factor,
                      int add, float *to, long ldto) {
    __m512 acc[SUM_RANKS][2];
#pragma GCC unroll 8
    for (int q = 0; q < ranks; q++) acc[q][0] = acc[q][1] = _mm512_setzero_ps();
    for (long i = 0; i < rows; i += 2, pairs += ldp) {
        __m512i a = _mm512_loadu_si512(m + i * ldm), b = _mm512_loadu_si512(m + (i + 1 < rows ? i + 1 : i) * ldm);
        __builtin_prefetch(m + i * ldm + 2 * LANES), __builtin_prefetch(m + (i + 1) * ldm + 2 * LANES);
        __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b), high = (__m512bh)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 8
        for (int q = 0; q < ranks; q++) {
            __m512bh number = (__m512bh)_mm512_set1_epi32(pairs[q]);
            acc[q][0] = _mm512_dpbf16_ps(acc[q][0], low, number);
            acc[q][1] = _mm512_dpbf16_ps(acc[q][1], high, number);
        }
    }
#pragma GCC unroll 8
    for (int q = 0; q < ranks; q++) {
        v16 low = (v16)acc[q][0], high = (v16)acc[q][1];
        float *at = to + q * ldto;
        v16 first = SHUFFLE(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        v16 second = SHUFFLE(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        first *= same(factor), second *= same(factor);
        store_f32(at, add ? load_f32(at) + first : first);
        store_f32(at + LANES, add ? load_f32(at + LANES) + second : second);
    }
}
#endif

/* The numbers of pairs of rows side by side: [rows / 2][ranks][2]; where pairs are not multiplied, nothing. */
static void OF(pair)(long rows, long ranks, const T *h, long ldh, T *pairs) {
#ifdef IN_PAIRS
    for (long i = 0; i < rows; i += 2) {
        const T *a = h + i * ldh, *b = a + ldh;
        T *to = pairs + i * ranks;
        if (i + 1 < rows)
            for (long q = 0; q < ranks; q++) to[2 * q] = a[q], to[2 * q + 1] = b[q];
        else
            for (long q = 0; q < ranks; q++) to[2 * q] = a[q], to[2 * q + 1] = 0;
    }
#endif
}

/* The same for all ranks and up to STRIP columns. */
static void OF(sum_strip)(long ranks, long rows, const T *h, long ldh, const T *pairs, long ldp, const T *m, long ldm,
                          long left, float factor, int add, float *to, long ldto) {
    for (long q = 0, here; q < ranks; q += here) {
        here = ranks - q >= 8 && SUM_RANKS == 8 ? 8 : ranks - q >= 4 ? 4 : ranks - q >= 2 ? 2 : 1;
#ifdef IN_PAIRS
#define WHOLE(N) sum_pairs(N, rows, (const int32_t *)pairs + q, ldp, m, ldm, factor, add, to + q * ldto, ldto)
#else
#define WHOLE(N) OF(sum_tile)(N, SUM_VECTORS, rows, h + q, ldh, m, ldm, STRIP, factor, add, to + q * ldto, ldto)
#endif
#define CASE(N)                                                                                                        \
    case N:                                                                                                            \
        if (left >= STRIP) WHOLE(N);                                                                                   \
        else                                                                                                           \
            for (long c = 0; c < left; c += LANES)                                                                     \
                OF(sum_tile)(N, 1, rows, h + q, ldh, m + c, ldm, left - c, factor, add, to + q * ldto + c, ldto);      \
        break;
        switch (here) {
#if SUM_RANKS == 8
            CASE(8)
#endif
            CASE(4) CASE(2) CASE(1)
        }
#undef CASE
#undef WHOLE
    }
}

/* The backward pass of out = ... + (x A^T) (s B)^T, all layers and segments:
 *
 *     numbers = grad (s B), gradient of B^T = s (x A^T)^T grad, gradient of A = numbers^T x
 *
 * grad: [rows][outputs]; x: [rows][size]; kept: x A^T as the forward pass had it; low->up: (s B)^T; factors:
 * [segments][layers] s. Several segments of one adapter are summed: the first of them, which is fresh, sets the sums
 * and the others add to them. downs, ups: [segments] and [segments][layers], where in `grads` an adapter's A
 * [ranks][size] and each layer's B [outputs][ranks] begin. B^T [ranks][outputs] comes first, in `room` numbers that are
 * given back; parts: [segments], where in them an adapter's begins, -1 where no gradients are wanted. */
void OF(low_rank_backward)(const T *grad, long ldg, const T *x, long ldx, long size, const T *kept, long ldk,
                           const LowRank *low, const float *factors, const char *fresh, float *grads,
                           const int64_t *downs, const int64_t *ups, const int64_t *parts, long room, int threads) {
    long layers = low->layers, width = low->columns[layers], ld = low->ld, most = 0;
    for (long s = 0; s < low->segments; s++)
        if (ranks_of(low, s) > most) most = ranks_of(low, s);
    if (!most) return;
    float *sums = malloc((room ? room : 1) * sizeof(float));
    if (!sums) abort();
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        T *pairs = malloc(BLOCK * most * sizeof(T));
        if (!pairs) abort();
        long start = 0;
        for (long s = 0; s < low->segments; start = low->stops[s++]) {
            const int64_t *ranks = low->ranks + s * (layers + 1);
            long all = ranks[layers], last = low->stops[s];
            if (!all) continue;
            /* One without rows still sets its sums. */
            for (long r = start; r < last || (r == start && fresh[s]); r += BLOCK) {
                long n = least(BLOCK, last - r);
                int add = r > start || !fresh[s];
                T *numbers = (T *)low->numbers + r * ld;
#pragma omp for
                for (long i = 0; i < n; i += DOTS) {
                    const T *up = low->up[s];
                    for (long l = 0; l < layers; l++) {
                        long c = low->columns[l], q = ranks[l], own = low->columns[l + 1] - c;
                        OF(dots)(least(n - i, DOTS), ranks[l + 1] - q, grad + (r + i) * ldg + c, ldg, up, own, own,
                                 NULL, numbers + i * ld + q, ld);
                        up += (ranks[l + 1] - q) * own;
                    }
                    OF(even)(low, all, r + i, r + least(i + DOTS, n));
                }
                if (parts[s] < 0) continue;
                OF(pair)(n, all, kept + r * ldk, ldk, pairs);
                for (long l = 0; l < layers; l++) {
                    long c = low->columns[l], end = low->columns[l + 1], q = ranks[l];
#pragma omp for nowait
                    for (long at = c; at < end; at += STRIP)
                        OF(sum_strip)(ranks[l + 1] - q, n, kept + r * ldk + q, ldk, pairs + 2 * q, all,
                                      grad + r * ldg + at, ldg, end - at, factors[s * layers + l], add,
                                      sums + parts[s] + q * width + at, width);
                }
                OF(pair)(n, all, numbers, ld, pairs);
#pragma omp for nowait
                for (long at = 0; at < size; at += STRIP)
                    OF(sum_strip)(all, n, numbers, ld, pairs, all, x + r * ldx + at, ldx, size - at, 1, add,
                                  grads + downs[s] + at, size);
            }
        }
        free(pairs);
    }
    for (long s = 0; s < low->segments; s++)
        if (fresh[s] && parts[s] >= 0)
            turn(layers, low->ranks + s * (layers + 1), low->columns, sums + parts[s], ups + s * layers, grads);
    free(sums);
}
