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

/* out += B (A x) for rows that are sorted by adapter. a: [K, rank, in]; b: [K, rank, out], scaled. The outputs of the
 * layers of a fused one are `parts` ranges that begin at starts[0..parts]; of adapter k, ranks[k][p] to ranks[k][p + 1]
 * act on part p, and the rest of b is 0. index: the adapter of each row, -1 for none. */
#define LORA_ROWS 4
INLINE void OF(lora_tile)(int rows, const T *x, long size, const T *a, const T *b, const int32_t *ranks,
                          const int32_t *starts, int parts, float *inner, T *out, long width) {
    int rank = ranks[parts];
    int r = 0;
    for (; r + 4 <= rank; r += 4) {
        v16 acc[LORA_ROWS][4];
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < 4; j++) acc[i][j] = same(0.0f);
        long c = 0;
        for (; c + OF(WIDE) <= size; c += OF(WIDE)) {
            OF(wide) w[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) w[j] = OF(load_wide)(a + (r + j) * size + c);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) {
                OF(wide) v = OF(load_wide)(x + i * size + c);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) acc[i][j] = OF(add_products)(acc[i][j], v, w[j]);
            }
        }
        for (; c < size; c += LANES)
            for (int j = 0; j < 4; j++) {
                v16 w = OF(load_some)(a + (r + j) * size + c, size - c);
                for (int i = 0; i < rows; i++) acc[i][j] += OF(load_some)(x + i * size + c, size - c) * w;
            }
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < 4; j++) inner[i * rank + r + j] = sum(acc[i][j]);
    }
    for (; r < rank; r++)
        for (int i = 0; i < rows; i++) {
            v16 acc = same(0.0f);
            for (long c = 0; c < size; c += LANES)
                acc += OF(load_some)(x + i * size + c, size - c) * OF(load_some)(a + r * size + c, size - c);
            inner[i * rank + r] = sum(acc);
        }
    for (int p = 0; p < parts; p++) {
        if (ranks[p] == ranks[p + 1]) continue;
        for (long c = starts[p]; c < starts[p + 1]; c += LANES) {
            long n = starts[p + 1] - c;
            v16 acc[LORA_ROWS];
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) acc[i] = OF(load_some)(out + i * width + c, n);
            for (int q = ranks[p]; q < ranks[p + 1]; q++) {
                v16 w = OF(load_some)(b + q * width + c, n);
#pragma GCC unroll 4
                for (int i = 0; i < rows; i++) acc[i] += same(inner[i * rank + q]) * w;
            }
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) OF(store_some)(out + i * width + c, acc[i], n);
        }
    }
}

void OF(add_lora)(const T *x, long rows, long size, const T *a, const T *b, long most, const int32_t *ranks,
                  const int32_t *starts, int parts, const int32_t *index, T *out, long width, int threads) {
    long tiles = (rows + LORA_ROWS - 1) / LORA_ROWS;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long tile = 0; tile < tiles; tile++) {
        long last = (tile + 1) * LORA_ROWS < rows ? (tile + 1) * LORA_ROWS : rows;
        float inner[LORA_ROWS * most];
        for (long r = tile * LORA_ROWS; r < last;) {
            long k = index[r];
            int here = 1;
            while (r + here < last && index[r + here] == k) here++;
            if (k >= 0) {
                const T *ak = a + k * most * size, *bk = b + k * most * width;
                const int32_t *own = ranks + k * (parts + 1);
                const T *xr = x + r * size;
                T *to = out + r * width;
                /* A constant number of rows, so that their sums stay in registers. */
                if (here == 4) OF(lora_tile)(4, xr, size, ak, bk, own, starts, parts, inner, to, width);
                else if (here == 3) OF(lora_tile)(3, xr, size, ak, bk, own, starts, parts, inner, to, width);
                else if (here == 2) OF(lora_tile)(2, xr, size, ak, bk, own, starts, parts, inner, to, width);
                else OF(lora_tile)(1, xr, size, ak, bk, own, starts, parts, inner, to, width);
            }
            r += here;
        }
    }
}

/* A head, normed if there are factors, and rotated: x[i] and x[i + half] by the angle whose cosine and sine, with its
 * sign, stand in the tables. */
INLINE void OF(rotate)(const T *x, const float *factors, float eps, const T *cosine, const T *sine, long dim,
                       float *out) {
    float own[dim];
    for (long i = 0; i < dim; i++) own[i] = OF(from)(x[i]);
    if (factors) {
        float scale = OF(norm_scale)(x, dim, eps);
        for (long i = 0; i < dim; i++) own[i] *= scale * factors[i];
    }
    long half = dim / 2;
    for (long i = 0; i < half; i++) out[i] = own[i] * OF(from)(cosine[i]) + own[i + half] * OF(from)(sine[i]);
    for (long i = half; i < dim; i++) out[i] = own[i] * OF(from)(cosine[i]) + own[i - half] * OF(from)(sine[i]);
}

/* Keys [dim, stride], a column each, and values [.., dim]; those from `first` to `last` are read. Columns up to the
 * next multiple of 16 exist. */
typedef struct {
    const T *keys, *values;
    long stride, first, last;
} OF(Part);

/* Attention of `group` queries [group, dim] that read one key head, to a part, added to what they have read before:
 * sums [group, dim], largest score and total of each. `group` is a constant where it is called, so that its loops are
 * unrolled. */
INLINE void OF(read_of)(int group, const float *q, OF(Part) part, long dim, float scale, float cap, float *sums,
                        float *largest, float *totals) {
    float scores[MOST_GROUP * KEYS] __attribute__((aligned(64)));
    if (part.first >= part.last) return;
    for (long from = part.first / LANES * LANES; from < part.last; from += KEYS) {
        long here = part.last - from < KEYS ? part.last - from : KEYS, padded = (here + LANES - 1) / LANES * LANES;
        long skipped = part.first > from ? part.first - from : 0;
        for (long i = 0; i < padded; i += LANES) {
            v16 acc[MOST_GROUP];
#pragma GCC unroll 4
            for (int g = 0; g < group; g++) acc[g] = same(0.0f);
            const T *column = part.keys + from + i;
            for (long d = 0; d < dim; d++, column += part.stride) {
                v16 k = OF(load)(column);
#pragma GCC unroll 4
                for (int g = 0; g < group; g++) acc[g] += same(q[g * dim + d]) * k;
            }
#pragma GCC unroll 4
            for (int g = 0; g < group; g++) store_f32(scores + g * KEYS + i, acc[g] * same(scale));
        }
        for (int g = 0; g < group; g++) {
            float *p = scores + g * KEYS;
            if (cap > 0)
                for (long i = skipped; i < here; i++) p[i] = cap * tanhf(p[i] / cap);
            for (long i = 0; i < skipped; i++) p[i] = -INFINITY;
            for (long i = here; i < padded; i++) p[i] = -INFINITY;
            v16 top = load_f32(p);
            for (long i = LANES; i < padded; i += LANES) {
                v16 v = load_f32(p + i);
                top = greater(v, top);
            }
            float most = largest[g];
            for (int i = 0; i < LANES; i++) most = top[i] > most ? top[i] : most;
            v16 total = same(0.0f);
            for (long i = 0; i < padded; i += LANES) {
                v16 e = exponential(load_f32(p + i) - same(most));
                store_f32(p + i, e);
                total += e;
            }
            float shrunk = largest[g] == most ? 1.0f : expf(largest[g] - most);
            totals[g] = totals[g] * shrunk + sum(total);
            largest[g] = most;
            if (shrunk != 1.0f)
                for (long d = 0; d < dim; d++) sums[g * dim + d] *= shrunk;
        }
        for (long d = 0; d < dim; d += LANES) {
            long n = dim - d;
            v16 acc[MOST_GROUP];
#pragma GCC unroll 4
            for (int g = 0; g < group; g++) acc[g] = load_some_f32(sums + g * dim + d, n);
            const T *value = part.values + from * dim + d;
            for (long i = skipped; i < here; i++) {
                v16 v = OF(load_some)(value + i * dim, n);
#pragma GCC unroll 4
                for (int g = 0; g < group; g++) acc[g] += same(scores[g * KEYS + i]) * v;
            }
#pragma GCC unroll 4
            for (int g = 0; g < group; g++) store_some_f32(sums + g * dim + d, acc[g], n);
        }
    }
}

static void OF(read_part)(int group, const float *q, OF(Part) part, long dim, float scale, float cap, float *sums,
                          float *largest, float *totals) {
#define GROUP(N)                                                                                                       \
    case N:                                                                                                            \
        OF(read_of)(N, q, part, dim, scale, cap, sums, largest, totals);                                               \
        break;
    switch (group) { GROUP(1) GROUP(2) GROUP(3) GROUP(4) }
#undef GROUP
}

/* One row's queries of one key head, rotated, to its prompt and its own tokens. */
static void OF(attend_group)(int group, const float *q, OF(Part) far, OF(Part) near, long dim, float scale, float cap,
                             float *out) {
    float sums[MOST_GROUP * dim], largest[MOST_GROUP], totals[MOST_GROUP];
    for (int g = 0; g < group; g++) largest[g] = -INFINITY, totals[g] = 0.0f;
    for (long d = 0; d < group * dim; d++) sums[d] = 0.0f;
    OF(read_part)(group, q, far, dim, scale, cap, sums, largest, totals);
    OF(read_part)(group, q, near, dim, scale, cap, sums, largest, totals);
    for (int g = 0; g < group; g++)
        for (long d = 0; d < dim; d++) out[g * dim + d] = sums[g * dim + d] / totals[g];
}

/* One query per row to its prompt and its own tokens, the newest of which is rotated and stored here.
 *
 * qkv: [rows, (heads + 2 kv_heads) dim]; cosine, sine: [rows, dim]; norms: NULL, or factors [heads + kv_heads, dim] of
 * the queries and keys. far_k: [prompts, kv_heads, dim, room], far_v: [prompts, kv_heads, longest, dim], of which
 * lengths[prompt] are filled; owner: the prompt of each row. near_k: [rows, kv_heads, dim, capacity], near_v: [rows,
 * kv_heads, capacity, dim], of which `used` are filled before. Room and capacity are multiples of 16. window: tokens
 * that a query may attend to, itself included; 0: all. cap: bound of the scores; 0: none. out: [rows, heads dim]. */
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
            float rotated[dim];
            const T *key = row + (heads + h) * dim, *value = row + (heads + kv_heads + h) * dim;
            OF(rotate)(key, norms ? norms + (heads + h) * dim : NULL, eps, c, s, dim, rotated);
            for (long d = 0; d < dim; d++) keys[d * capacity + used] = OF(to)(rotated[d]);
            memcpy(values + used * dim, value, dim * sizeof *value);
            long own = used + 1, length = lengths[owner[r]], prompt = owner[r] * kv_heads + h;
            long hidden = window && length + own > window ? length + own - window : 0;
            OF(Part) far = {far_k + prompt * room * dim, far_v + prompt * longest * dim, room,
                        hidden < length ? hidden : length, length};
            OF(Part) near = {keys, values, capacity, hidden > length ? hidden - length : 0, own};
            for (long first = 0; first < group;) {
                int some = group - first < MOST_GROUP ? (int)(group - first) : MOST_GROUP;
                float q[MOST_GROUP * dim], to[MOST_GROUP * dim];
                for (long g = 0; g < some; g++) {
                    long head = h * group + first + g;
                    const float *factors = norms ? norms + head * dim : NULL;
                    OF(rotate)(row + head * dim, factors, eps, c, s, dim, q + g * dim);
                }
                OF(attend_group)(some, q, far, near, dim, scale, cap, to);
                T *head = out + r * heads * dim + (h * group + first) * dim;
                for (long d = 0; d < some * dim; d += LANES)
                    OF(store_some)(head + d, load_some_f32(to + d, some * dim - d), some * dim - d);
                first += some;
            }
        }
}
