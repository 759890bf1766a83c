/* Attention of the learning pass: rows, some with a common beginning, forward and backward, in float32.
 *
 * A family is a beginning and rows that continue it. Every row attends to the beginning and, causally, to itself; the
 * beginning attends to itself unless another pass has computed it. One task is a family and a key head with all query
 * heads that read it, so the sums do not depend on the number of threads. Only the log-sum-exps are kept: for short
 * rows the probabilities are computed again faster than memory holds them. */
#include <math.h>
#include <stdlib.h>

#include "tiles.h"

#define QUERIES 48 /* in a block, whose scores stay in the cache */

typedef struct {
    const char *data;
    long head, token; /* distances in numbers; the numbers of a token lie side by side */
} Heads;

typedef struct {
    Heads q, k, v, past_k, past_v, out, grad, dq, dk, dv;
    float *lse;                    /* [heads][tokens] */
    const long *families, *rows;   /* [families + 1][first, shared, in past, first row]; [rows][first, tokens] */
    long count, heads, kv_heads, tokens, size;
    float scale;
    int half, threads;
} Pass;

/* Keys and values of consecutive tokens of one head in float32. */
typedef struct {
    long tokens, width; /* width: the head's size in whole vectors */
    float *k, *v;       /* [tokens][width] */
    float *kt, *vt;     /* transposed, in blocks of TILE_WIDTH tokens: [block][size][TILE_WIDTH] */
    float *dk, *dv;     /* [tokens][width] */
} Keys;

/* What a task writes in between; room for one block of queries. */
typedef struct {
    float *q, *grad, *sums; /* [QUERIES][width] */
    float *p, *ds;          /* [QUERIES][ld], first the beginning's keys and then the row's own */
    long ld;
} Scratch;

INLINE const void *place(Heads t, long head, long token, int half) {
    return t.data + (head * t.head + token * t.token) * (half ? 2 : 4);
}

static void copy_rows(Heads t, long head, long first, long tokens, long size, int half, float *rows, float *columns) {
    long width = in_lanes(size);
    for (long i = 0; i < tokens; i++) {
        const void *from = place(t, head, first + i, half);
        float *row = rows + i * width;
        for (long d = 0; d < size; d += LANES) store_f32(row + d, load(from, d, size - d, half));
    }
    if (!columns) return;
    for (long block = 0; block * TILE_WIDTH < tokens; block++) {
        long n = least(tokens - block * TILE_WIDTH, TILE_WIDTH);
        float *to = columns + block * size * TILE_WIDTH;
        const float *from = rows + block * TILE_WIDTH * width;
        for (long d = 0; d < size; d++) {
            for (long i = 0; i < n; i++) to[d * TILE_WIDTH + i] = from[i * width + d];
            for (long i = n; i < TILE_WIDTH; i++) to[d * TILE_WIDTH + i] = 0;
        }
    }
}

static float *take(float **free, long numbers) {
    float *taken = *free;
    *free += in_lanes(numbers);
    return taken;
}

static long columns_of(long tokens, long size) {
    return (tokens + TILE_WIDTH - 1) / TILE_WIDTH * TILE_WIDTH * size;
}

static Keys room_for_keys(float **free, long tokens, long size, int backward) {
    Keys keys = {.tokens = 0, .width = in_lanes(size)};
    keys.k = take(free, tokens * keys.width);
    keys.v = take(free, tokens * keys.width);
    keys.kt = take(free, columns_of(tokens, size));
    if (backward) {
        keys.vt = take(free, columns_of(tokens, size));
        keys.dk = take(free, tokens * keys.width);
        keys.dv = take(free, tokens * keys.width);
    }
    return keys;
}

static long room_of_keys(long tokens, long size) {
    return 4 * tokens * in_lanes(size) + 2 * columns_of(tokens, size) + 6 * LANES;
}

static void read_keys(const Pass *pass, Keys *keys, int past, long head, long first, long tokens) {
    keys->tokens = tokens;
    copy_rows(past ? pass->past_k : pass->k, head, first, tokens, pass->size, pass->half, keys->k, keys->kt);
    copy_rows(past ? pass->past_v : pass->v, head, first, tokens, pass->size, pass->half, keys->v, keys->vt);
    if (keys->dk) {
        memset(keys->dk, 0, tokens * keys->width * sizeof(float));
        memset(keys->dv, 0, tokens * keys->width * sizeof(float));
    }
}

static void write_key_grads(const Pass *pass, const Keys *keys, long head, long first) {
    for (long i = 0; i < keys->tokens; i++) {
        void *dk = (void *)place(pass->dk, head, first + i, pass->half);
        void *dv = (void *)place(pass->dv, head, first + i, pass->half);
        for (long d = 0; d < pass->size; d += LANES) {
            store(dk, d, load_f32(keys->dk + i * keys->width + d), pass->size - d, pass->half);
            store(dv, d, load_f32(keys->dv + i * keys->width + d), pass->size - d, pass->half);
        }
    }
}

/* scores[m][...] = q K^T of both parts, of which a query sees the first `far->tokens` and `seen` keys. */
static void scores(const Scratch *s, float *to, const float *q, long m, const Keys *far, const Keys *near, long seen,
                   long size, int values) {
    long split = in_lanes(far->tokens), block = size * TILE_WIDTH;
    multiply(m, split, size, q, near->width, 1, values ? far->vt : far->kt, TILE_WIDTH, block, to, s->ld, 0);
    multiply(m, in_lanes(seen), size, q, near->width, 1, values ? near->vt : near->kt, TILE_WIDTH, block, to + split,
             s->ld, 0);
}

/* to[m][width] = weights times keys or values of both parts. */
static void mixed(const Scratch *s, float *to, const float *weights, long m, const Keys *far, const Keys *near,
                  long seen, int values) {
    long split = in_lanes(far->tokens), width = near->width;
    multiply(m, width, seen, weights + split, s->ld, 1, values ? near->v : near->k, width, TILE_WIDTH, to, width, 0);
    if (far->tokens)
        multiply(m, width, far->tokens, weights, s->ld, 1, values ? far->v : far->k, width, TILE_WIDTH, to, width, 1);
}

/* Adds the transposed weights times `rows` to the keys' or the values' gradients of both parts. */
static void spread(const Scratch *s, const float *weights, const float *rows, long m, const Keys *far,
                   const Keys *near, long seen, int values) {
    long split = in_lanes(far->tokens), width = near->width;
    multiply(seen, width, m, weights + split, 1, s->ld, rows, width, TILE_WIDTH, values ? near->dv : near->dk, width,
             1);
    if (far->tokens)
        multiply(far->tokens, width, m, weights, 1, s->ld, rows, width, TILE_WIDTH, values ? far->dv : far->dk, width,
                 1);
}

/* The first n of the 16 lanes that begin at `at`; the others become `other`. */
INLINE v16 first_of(v16 x, long at, long n, float other) {
    const i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    long left = n - at;
    if (left >= LANES) return x;
    i16 keep = lane < (i16)((i16){0} + (int)(left < 0 ? 0 : left));
    return (v16)(((i16)x & keep) | ((i16)same(other) & ~keep));
}
/* The largest score that a query sees: `far` keys of the beginning and `near` of its row. */
static float top_of(const float *row, long far, long near) {
    long split = in_lanes(far);
    v16 most = same(-INFINITY);
    for (long j = 0; j < split; j += LANES) most = greater(first_of(load_f32(row + j), j, far, -INFINITY), most);
    for (long j = 0; j < near; j += LANES)
        most = greater(first_of(load_f32(row + split + j), j, near, -INFINITY), most);
    return largest(most);
}

/* Scores of one query become e^(score - top); returns their sum. Of `width` keys those that it does not see get 0. */
static float weigh(float *row, long far, long near, long width, float top) {
    long split = in_lanes(far);
    v16 total = same(0), from = same(top);
    for (long j = 0; j < split; j += LANES) {
        v16 e = first_of(exponential(load_f32(row + j) - from), j, far, 0);
        store_f32(row + j, e);
        total += e;
    }
    for (long j = 0; j < width; j += LANES) {
        v16 e = j < near ? first_of(exponential(load_f32(row + split + j) - from), j, near, 0) : same(0);
        store_f32(row + split + j, e);
        total += e;
    }
    return sum(total);
}

/* Queries m0 to m0 + m of a row in float32, times `factor`; a token's heads stand next to each other. */
static void gather(const Pass *pass, Heads t, float factor, long head, long first, long m0, long m, float *to) {
    long group = pass->heads / pass->kv_heads, width = in_lanes(pass->size);
    for (long i = 0; i < m; i++) {
        const void *from = place(t, head * group + (m0 + i) % group, first + (m0 + i) / group, pass->half);
        for (long d = 0; d < pass->size; d += LANES)
            store_f32(to + i * width + d, load(from, d, pass->size - d, pass->half) * same(factor));
    }
}

static void put(const Pass *pass, Heads t, const float *from, float factor, long head, long token) {
    void *to = (void *)place(t, head, token, pass->half);
    for (long d = 0; d < pass->size; d += LANES)
        store(to, d, load_f32(from + d) * same(factor), pass->size - d, pass->half);
}

static void row_forward(const Pass *pass, const Scratch *s, const Keys *far, const Keys *near, long head, long first) {
    long group = pass->heads / pass->kv_heads, all = near->tokens * group;
    for (long m0 = 0; m0 < all; m0 += QUERIES) {
        long m = least(QUERIES, all - m0), seen = (m0 + m - 1) / group + 1;
        float totals[QUERIES];
        gather(pass, pass->q, pass->scale, head, first, m0, m, s->q);
        scores(s, s->p, s->q, m, far, near, seen, pass->size, 0);
        for (long i = 0; i < m; i++) {
            long token = (m0 + i) / group, own = head * group + (m0 + i) % group;
            float *row = s->p + i * s->ld, top = top_of(row, far->tokens, token + 1);
            totals[i] = weigh(row, far->tokens, token + 1, in_lanes(seen), top);
            pass->lse[own * pass->tokens + first + token] = top + logf(totals[i]);
        }
        mixed(s, s->sums, s->p, m, far, near, seen, 1);
        for (long i = 0; i < m; i++)
            put(pass, pass->out, s->sums + i * near->width, 1 / totals[i], head * group + (m0 + i) % group,
                first + (m0 + i) / group);
    }
}

static void row_backward(const Pass *pass, const Scratch *s, const Keys *far, const Keys *near, long head,
                         long first) {
    long group = pass->heads / pass->kv_heads, all = near->tokens * group;
    for (long m0 = 0; m0 < all; m0 += QUERIES) {
        long m = least(QUERIES, all - m0), seen = (m0 + m - 1) / group + 1;
        long numbers = in_lanes(far->tokens) + in_lanes(seen);
        gather(pass, pass->q, pass->scale, head, first, m0, m, s->q);
        gather(pass, pass->grad, 1, head, first, m0, m, s->grad);
        scores(s, s->p, s->q, m, far, near, seen, pass->size, 0);
        scores(s, s->ds, s->grad, m, far, near, seen, pass->size, 1);
        for (long i = 0; i < m; i++) {
            long token = (m0 + i) / group, own = head * group + (m0 + i) % group;
            float *p = s->p + i * s->ld, *ds = s->ds + i * s->ld;
            float lse = pass->lse[own * pass->tokens + first + token];
            weigh(p, far->tokens, token + 1, in_lanes(seen), lse);
            v16 both = same(0);
            for (long j = 0; j < numbers; j += LANES) both += load_f32(p + j) * load_f32(ds + j);
            v16 mean = same(sum(both));
            for (long j = 0; j < numbers; j += LANES)
                store_f32(ds + j, load_f32(p + j) * (load_f32(ds + j) - mean));
        }
        mixed(s, s->sums, s->ds, m, far, near, seen, 0);
        for (long i = 0; i < m; i++)
            put(pass, pass->dq, s->sums + i * near->width, pass->scale, head * group + (m0 + i) % group,
                first + (m0 + i) / group);
        spread(s, s->ds, s->q, m, far, near, seen, 0);
        spread(s, s->p, s->grad, m, far, near, seen, 1);
    }
}

static void task(const Pass *pass, const long *family, long head, int backward) {
    long begin = family[0], shared = family[1], past = family[2], longest = 0, width = in_lanes(pass->size);
    for (long r = family[3]; r < family[7]; r++)
        if (pass->rows[2 * r + 1] > longest) longest = pass->rows[2 * r + 1];
    Scratch s = {.ld = in_lanes(shared) + in_lanes(longest > shared ? longest : shared) + LANES};
    long room = room_of_keys(shared, pass->size) + room_of_keys(longest, pass->size);
    room += QUERIES * (3 * width + 2 * s.ld) + 8 * LANES;
    float *memory = malloc(room * sizeof(float)), *rest = memory;
    if (!memory) abort();
    s.q = take(&rest, QUERIES * width);
    s.grad = take(&rest, QUERIES * width);
    s.sums = take(&rest, QUERIES * width);
    s.p = take(&rest, QUERIES * s.ld);
    s.ds = take(&rest, QUERIES * s.ld);
    Keys none = {0}, far = room_for_keys(&rest, shared, pass->size, backward);
    Keys near = room_for_keys(&rest, longest, pass->size, backward);
    read_keys(pass, &far, (int)past, head, begin, shared);
    void (*row)(const Pass *, const Scratch *, const Keys *, const Keys *, long, long) =
        backward ? row_backward : row_forward;
    if (!past && shared) row(pass, &s, &none, &far, head, begin);
    for (long r = family[3]; r < family[7]; r++) {
        long first = pass->rows[2 * r], tokens = pass->rows[2 * r + 1];
        read_keys(pass, &near, 0, head, first, tokens);
        row(pass, &s, &far, &near, head, first);
        if (backward) write_key_grads(pass, &near, head, first);
    }
    if (backward && !past) write_key_grads(pass, &far, head, begin);
    free(memory);
}

void learn_attention(const Pass *pass, int backward) {
    long tasks = pass->count * pass->kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(pass->threads) if (pass->threads > 1)
    for (long t = 0; t < tasks; t++)
        task(pass, pass->families + t / pass->kv_heads * 4, t % pass->kv_heads, backward);
}
