/* Included once for each number format: T, and OF(name) for the functions of that format. */

/* 1 / sqrt(mean(x^2) + eps) */
INLINE float OF(norm_scale)(const T *x, long width, float eps) {
    v16 squares = same(0.0f);
    for (long c = 0; c < width; c += LANES) {
        v16 v = OF(load_some)(x + c, width - c);
        squares += v * v;
    }
    return 1.0f / sqrtf(sum(squares) / (float)width + eps);
}

/* out = factors x / sqrt(mean(x^2) + eps) */
void OF(rms_norm)(const T *x, const float *factors, long rows, long width, float eps, T *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long r = 0; r < rows; r++) {
        v16 scale = same(OF(norm_scale)(x + r * width, width, eps));
        for (long c = 0; c < width; c += LANES) {
            v16 v = OF(load_some)(x + r * width + c, width - c) * scale;
            OF(store_some)(out + r * width + c, v * load_some_f32(factors + c, width - c), width - c);
        }
    }
}

/* out = silu(gate) up, of rows that hold gate and up side by side. */
void OF(silu_product)(const T *gate_up, long rows, long width, T *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long r = 0; r < rows; r++) {
        const T *gate = gate_up + r * 2 * width, *up = gate + width;
        for (long c = 0; c < width; c += LANES) {
            v16 g = OF(load_some)(gate + c, width - c), u = OF(load_some)(up + c, width - c);
            OF(store_some)(out + r * width + c, g / (same(1.0f) + exponential(-g)) * u, width - c);
        }
    }
}

/* A head, normed if there are factors, and rotated: x[i] and x[i + half] by the angle whose cosine and sine, with its
 * sign, stand in the tables. */
INLINE void OF(rotate)(const T *x, const float *factors, float eps, const T *cosine, const T *sine, long dim,
                       float *out) {
    long half = dim / 2;
    v16 scale = factors ? same(OF(norm_scale)(x, dim, eps)) : same(1);
    for (long i = 0; i < half; i += LANES) {
        long n = half - i, j = i + half;
        v16 a = OF(load_some)(x + i, n) * scale, b = OF(load_some)(x + j, n) * scale;
        if (factors) a *= load_some_f32(factors + i, n), b *= load_some_f32(factors + j, n);
        store_some_f32(out + i, a * OF(load_some)(cosine + i, n) + b * OF(load_some)(sine + i, n), n);
        store_some_f32(out + j, b * OF(load_some)(cosine + j, n) + a * OF(load_some)(sine + j, n), n);
    }
}

/* Keys, a column of `dim` numbers each, and values [.., dim]; those from `first` to `last` are read. Next to each other
 * lie a dimension's numbers of 16 keys; `stride` is the distance from one dimension to the next, and `block` from 16
 * keys to the next, which exist as a whole. */
typedef struct {
    const T *keys, *values;
    long stride, block, first, last;
} OF(Part);

/* Scores of `group` queries [group, dim] with `vectors` times 16 keys. */
INLINE void OF(score)(int group, int vectors, const float *q, const T *keys, long stride, long block, long dim,
                      float scale, float *scores) {
    v16 acc[MOST_GROUP][MOST_VECTORS];
#pragma GCC unroll 4
    for (int g = 0; g < group; g++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[g][v] = same(0);
    for (long d = 0; d < dim; d++, keys += stride) {
        v16 k[MOST_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) k[v] = OF(load)(keys + v * block);
#pragma GCC unroll 4
        for (int g = 0; g < group; g++) {
            v16 number = same(q[g * dim + d]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) acc[g][v] += number * k[v];
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < group; g++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_f32(scores + g * KEYS + v * LANES, acc[g][v] * same(scale));
}

/* sums[group, dim] += weights times values of `vectors` times 16 dimensions, or of fewer where only n of them exist. */
INLINE void OF(mix)(int group, int vectors, const float *weights, const T *values, long keys, long dim, long n,
                    float *sums) {
    v16 acc[MOST_GROUP][MOST_VECTORS];
#pragma GCC unroll 4
    for (int g = 0; g < group; g++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[g][v] = load_some_f32(sums + g * dim + v * LANES, n);
    for (long i = 0; i < keys; i++, values += dim) {
        v16 value[MOST_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) value[v] = OF(load_some)(values + v * LANES, n);
#pragma GCC unroll 4
        for (int g = 0; g < group; g++) {
            v16 weight = same(weights[g * KEYS + i]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) acc[g][v] += weight * value[v];
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < group; g++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_some_f32(sums + g * dim + v * LANES, acc[g][v], n);
}

/* Scores of `group` queries with keys of a part, in whole vectors from key `from` on: of `keys` that exist, the first
 * `skipped` are not read. */
INLINE void OF(scores_of)(int group, const float *q, const OF(Part) *part, long from, long keys, long skipped, long dim,
                          float scale, float cap, float *scores) {
    long padded = (keys + LANES - 1) / LANES * LANES;
    for (long i = 0; i < padded;) {
        const T *first = part->keys + (from + i) / LANES * part->block;
#define SCORE(N) OF(score)(group, N, q, first, part->stride, part->block, dim, scale, scores + i), i += N * LANES
        switch ((padded - i) / LANES) {
            case 1: SCORE(1); break;
            case 2: SCORE(2); break;
            case 3: SCORE(3); break;
            default: SCORE(4);
        }
#undef SCORE
    }
    for (int g = 0; g < group; g++) {
        float *p = scores + g * KEYS;
        if (cap > 0)
            for (long i = skipped; i < keys; i++) p[i] = cap * tanhf(p[i] / cap);
        for (long i = 0; i < skipped; i++) p[i] = -INFINITY;
        for (long i = keys; i < padded; i++) p[i] = -INFINITY;
    }
}

/* sums [group, dim] += weights times the values of `keys` keys. */
INLINE void OF(mix_of)(int group, const float *weights, const T *values, long keys, long dim, float *sums) {
    for (long d = 0; d < dim;) {
#define MIX(N) OF(mix)(group, N, weights, values + d, keys, dim, LANES, sums + d), d += N * LANES
        switch ((dim - d) / LANES) {
            case 0: OF(mix)(group, 1, weights, values + d, keys, dim, dim - d, sums + d), d = dim; break;
            case 1: MIX(1); break;
            case 2: MIX(2); break;
            case 3: MIX(3); break;
            default: MIX(4);
        }
#undef MIX
    }
}

/* One row's queries [group, dim] of one key head, rotated, to its prompt and its own tokens: up to KEYS of both at a
 * time. `group` is a constant where this is called, so that its loops are unrolled. */
INLINE void OF(attend_of)(int group, const float *q, const OF(Part) *far, const OF(Part) *near, long dim, float scale,
                          float cap, float *sums) {
    float scores[MOST_GROUP * KEYS] __attribute__((aligned(64))), tops[MOST_GROUP], totals[MOST_GROUP];
    for (int g = 0; g < group; g++) tops[g] = -INFINITY, totals[g] = 0;
    memset(sums, 0, group * dim * sizeof *sums);
    long f = far->first / LANES * LANES, n = near->first / LANES * LANES;
    while (f < far->last || n < near->last) {
        long fars = far->last - f < KEYS ? far->last - f : KEYS, split = (fars + LANES - 1) / LANES * LANES;
        long nears = near->last - n < KEYS - split ? near->last - n : KEYS - split;
        long padded = split + (nears + LANES - 1) / LANES * LANES;
        long far_skip = far->first > f ? far->first - f : 0, near_skip = near->first > n ? near->first - n : 0;
        OF(scores_of)(group, q, far, f, fars, far_skip, dim, scale, cap, scores);
        OF(scores_of)(group, q, near, n, nears, near_skip, dim, scale, cap, scores + split);
        for (int g = 0; g < group; g++) {
            float *p = scores + g * KEYS;
            v16 top = same(tops[g]), total = same(0);
            for (long i = 0; i < padded; i += LANES) top = greater(load_f32(p + i), top);
            float most = largest(top);
            for (long i = 0; i < padded; i += LANES) {
                v16 e = exponential(load_f32(p + i) - same(most));
                store_f32(p + i, e);
                total += e;
            }
            if (totals[g] != 0) {
                v16 shrunk = exponential(same(tops[g] - most));
                totals[g] *= shrunk[0];
                for (long d = g * dim; d < (g + 1) * dim; d += LANES) {
                    long left = (g + 1) * dim - d;
                    store_some_f32(sums + d, load_some_f32(sums + d, left) * shrunk, left);
                }
            }
            totals[g] += sum(total);
            tops[g] = most;
        }
        OF(mix_of)(group, scores + far_skip, far->values + (f + far_skip) * dim, fars - far_skip, dim, sums);
        OF(mix_of)(group, scores + split + near_skip, near->values + (n + near_skip) * dim, nears - near_skip, dim,
                   sums);
        f += fars, n += nears;
    }
    for (int g = 0; g < group; g++) {
        v16 share = same(1 / totals[g]);
        for (long d = g * dim; d < (g + 1) * dim; d += LANES) {
            long left = (g + 1) * dim - d;
            store_some_f32(sums + d, load_some_f32(sums + d, left) * share, left);
        }
    }
}

static void OF(attend_group)(int group, const float *q, const OF(Part) *far, const OF(Part) *near, long dim,
                             float scale, float cap, float *out) {
#define GROUP(N)                                                                                                       \
    case N:                                                                                                            \
        OF(attend_of)(N, q, far, near, dim, scale, cap, out);                                                          \
        break;
    switch (group) { GROUP(1) GROUP(2) GROUP(3) GROUP(4) }
#undef GROUP
}

/* One query per row to its prompt and its own tokens, the newest of which is rotated and stored here.
 *
 * qkv: [rows, (heads + 2 kv_heads) dim]; cosine, sine: [rows, dim]; norms: NULL, or factors [heads + kv_heads, dim] of
 * the queries and keys. far_k: [prompts, kv_heads, dim, room], far_v: [prompts, kv_heads, longest, dim], of which
 * lengths[prompt] are filled; owner: the prompt of each row. near_k: [rows, kv_heads, capacity / 16, dim, 16], near_v:
 * [rows, kv_heads, capacity, dim], of which `used` are filled before. Room and capacity are multiples of 16. window:
 * tokens that a query may attend to, itself included; 0: all. cap: bound of the scores; 0: none. out: [rows, heads
 * dim]. */
void OF(attend)(const T *qkv, const T *cosine, const T *sine, const float *norms, float eps, long rows, long heads,
                long kv_heads, long dim, const T *far_k, const T *far_v, long room, long longest,
                const int64_t *lengths, const int64_t *owner, T *near_k, T *near_v, long capacity, long used,
                long window, float scale, float cap, T *out, int threads) {
    long group = heads / kv_heads, width = (heads + 2 * kv_heads) * dim;
    /* Rows of a prompt lie side by side, so its keys stay in the cache from row to row. */
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1)
    for (long h = 0; h < kv_heads; h++)
        for (long r = 0; r < rows; r++) {
            const T *row = qkv + r * width, *c = cosine + r * dim, *s = sine + r * dim;
            T *keys = near_k + (r * kv_heads + h) * capacity * dim;
            T *values = near_v + (r * kv_heads + h) * capacity * dim;
            /* Each row's own keys lie apart from the last one's, so they are asked for before that one is done. */
            if (r + 1 < rows) {
                long next = kv_heads * capacity * dim, filled = (used / LANES + 1) * LANES * dim;
                filled = filled < AHEAD / (long)sizeof(T) ? filled : AHEAD / (long)sizeof(T);
                for (long i = 0; i < filled; i += LINE / sizeof(T)) {
                    __builtin_prefetch(keys + next + i);
                    __builtin_prefetch(values + next + i);
                }
            }
            float rotated[dim];
            const T *key = row + (heads + h) * dim, *value = row + (heads + kv_heads + h) * dim;
            OF(rotate)(key, norms ? norms + (heads + h) * dim : NULL, eps, c, s, dim, rotated);
            T *newest = keys + used / LANES * LANES * dim + used % LANES;
            for (long d = 0; d < dim; d++) newest[d * LANES] = OF(to)(rotated[d]);
            memcpy(values + used * dim, value, dim * sizeof *value);
            long own = used + 1, length = lengths[owner[r]], prompt = owner[r] * kv_heads + h;
            long hidden = window && length + own > window ? length + own - window : 0;
            OF(Part) far = {far_k + prompt * room * dim, far_v + prompt * longest * dim, room, LANES,
                        hidden < length ? hidden : length, length};
            OF(Part) near = {keys, values, LANES, LANES * dim, hidden > length ? hidden - length : 0, own};
            for (long first = 0; first < group;) {
                int some = group - first < MOST_GROUP ? (int)(group - first) : MOST_GROUP;
                float q[MOST_GROUP * dim], to[MOST_GROUP * dim];
                for (long g = 0; g < some; g++) {
                    long head = h * group + first + g;
                    const float *factors = norms ? norms + head * dim : NULL;
                    OF(rotate)(row + head * dim, factors, eps, c, s, dim, q + g * dim);
                }
                OF(attend_group)(some, q, &far, &near, dim, scale, cap, to);
                T *head = out + r * heads * dim + (h * group + first) * dim;
                for (long d = 0; d < some * dim; d += LANES)
                    OF(store_some)(head + d, load_some_f32(to + d, some * dim - d), some * dim - d);
                first += some;
            }
        }
}
