/* The gated delta rule and the short convolution before it (`mafrt/models/delta_rule.py` has the formulas), in float32.
 *
 * A chunk is computed with the state S before it, where L is its lower triangle of decayed k k^T times beta:
 *
 *     (1 + L) U = beta V - (beta b K) S,   O = (b Q) S + P U,   S' = b_end S + (l K)^T U
 *
 * with P the decayed lower triangle of q k^T, b the decay from the chunk's beginning and l that to its end. Backward the
 * chunks are computed again, since that is faster than memory holds what lies in between. One task is a row and a head,
 * so the sums do not depend on the number of threads. */
#include <math.h>
#include <stdlib.h>

#include "tiles.h"

#define CHUNK 64 /* tokens of the longest chunk, and numbers from one row of a matrix of tokens to the next */
#define SMALL 1e-6f

typedef struct {
    const char *data;
    long row, token, head; /* distances in numbers; those of a head lie side by side */
} Part;

typedef struct {
    Part q, k, v, g, beta;         /* g is float32 */
    const float *state;            /* [rows][heads][size][width]; NULL: zero */
    void *out;                     /* [rows][tokens][heads][width] */
    float *kept;                   /* as state, after the last token */
    Part grad;                     /* of out */
    const float *grad_kept;        /* NULL: zero */
    void *dq, *dk, *dv;            /* [rows][tokens][heads][size or width] */
    float *dg, *dbeta;             /* [rows][tokens][heads] */
    float *dstate;                 /* NULL: not wanted */
    long rows, tokens, heads, size, width;
    int normed, half, half_beta, threads;
} Pass;

INLINE const void *place(Part p, long row, long token, long head, int half) {
    return p.data + (row * p.row + token * p.token + head * p.head) * (half ? 2 : 4);
}

/* `size` numbers as float32, times `factor`, or that over their length; returns the factor. */
INLINE float read_scaled(const void *from, float *to, long size, int normed, float factor, int half) {
    v16 squares = same(0);
    for (long d = 0; d < size; d += LANES) {
        v16 v = load(from, d, LANES, half);
        squares += v * v;
        store_f32(to + d, v);
    }
    if (normed) factor /= sqrtf(sum(squares) + SMALL);
    for (long d = 0; d < size; d += LANES) store_f32(to + d, load_f32(to + d) * same(factor));
    return factor;
}

/* The state goes once through memory: it is read, and a moment later read again from the cache and written. */
INLINE void step_block(const float *k, const float *q, const float *v, float decay, float beta, float both,
                       const float *state, float *kept, float *out, long size, long width, int vectors) {
    v16 remembered[8], read[8], change[8];
#pragma GCC unroll 8
    for (int j = 0; j < vectors; j++) remembered[j] = read[j] = same(0);
    for (long d = 0; d < size; d++) {
        v16 key = same(k[d]), query = same(q[d]);
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            v16 s = load_f32(state + d * width + j * LANES);
            remembered[j] += key * s;
            read[j] += query * s;
        }
    }
    v16 left = same(decay);
#pragma GCC unroll 8
    for (int j = 0; j < vectors; j++) {
        change[j] = same(beta) * (load_f32(v + j * LANES) - left * remembered[j]);
        store_f32(out + j * LANES, left * read[j] + same(both) * change[j]);
    }
    for (long d = 0; d < size; d++) {
        v16 key = same(k[d]);
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            long at = d * width + j * LANES;
            store_f32(kept + at, left * load_f32(state + at) + key * change[j]);
        }
    }
}

void delta_step(const Pass *p) {
    long tasks = p->rows * p->heads, size = p->size, width = p->width;
#pragma omp parallel for num_threads(p->threads) if (p->threads > 1)
    for (long t = 0; t < tasks; t++) {
        long row = t / p->heads, head = t % p->heads;
        float k[size], q[size], v[width], out[width], both = 0;
        read_scaled(place(p->k, row, 0, head, p->half), k, size, p->normed, 1, p->half);
        read_scaled(place(p->q, row, 0, head, p->half), q, size, p->normed, 1 / sqrtf((float)size), p->half);
        read_scaled(place(p->v, row, 0, head, p->half), v, width, 0, 1, p->half);
        for (long d = 0; d < size; d++) both += k[d] * q[d];
        float decay = expf(number(place(p->g, row, 0, head, 0), 0, 0));
        float beta = number(place(p->beta, row, 0, head, p->half_beta), 0, p->half_beta);
        const float *state = p->state + t * size * width;
        float *kept = p->kept + t * size * width;
#define BLOCK(N) step_block(k, q, v + j, decay, beta, both, state + j, kept + j, out + j, size, width, N)
        for (long j = 0, vectors; j < width; j += vectors * LANES) {
            vectors = width - j >= 8 * LANES ? 8 : width - j >= 4 * LANES ? 4 : 1;
            if (vectors == 8) BLOCK(8);
            else if (vectors == 4) BLOCK(4);
            else BLOCK(1);
        }
#undef BLOCK
        for (long j = 0; j < width; j += LANES) store(p->out, t * width + j, load_f32(out + j), LANES, p->half);
    }
}

/* to[j][i] = from[i][j]; rows and columns are multiples of 16. */
#define SWAP(I, J, LOW, HIGH)                                                                                          \
    {                                                                                                                  \
        v16 a = r[I], b = r[J];                                                                                        \
        r[I] = SHUFFLE(a, b, LOW);                                                                                     \
        r[J] = SHUFFLE(a, b, HIGH);                                                                                    \
    }
#define LOW8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
static void transpose(const float *from, long ldf, long rows, long columns, float *to, long ldt) {
    for (long i = 0; i < rows; i += LANES)
        for (long j = 0; j < columns; j += LANES) {
            v16 r[LANES];
#pragma GCC unroll 16
            for (int n = 0; n < LANES; n++) r[n] = load_f32(from + (i + n) * ldf + j);
#pragma GCC unroll 8
            for (int n = 0; n < 8; n++) SWAP(n, n + 8, LOW8, HIGH8)
#pragma GCC unroll 8
            for (int n = 0; n < 8; n++) SWAP(n / 4 * 8 + n % 4, n / 4 * 8 + n % 4 + 4, LOW4, HIGH4)
#pragma GCC unroll 8
            for (int n = 0; n < 8; n++) SWAP(n / 2 * 4 + n % 2, n / 2 * 4 + n % 2 + 2, LOW2, HIGH2)
#pragma GCC unroll 8
            for (int n = 0; n < 8; n++) SWAP(n * 2, n * 2 + 1, LOW1, HIGH1)
#pragma GCC unroll 16
            for (int n = 0; n < LANES; n++) store_f32(to + (j + n) * ldt + i, r[n]);
        }
}

/* One chunk of a row's head, and what is computed of it. Rows behind its tokens are zero. */
typedef struct {
    long n, lanes;                       /* tokens, and in whole vectors */
    float *q, *k, *v, *kt;               /* [CHUNK][size], v [CHUNK][width]; k transposed [size][CHUNK] */
    float *r, *p;                        /* [CHUNK][CHUNK]: decayed k k^T below the diagonal, decayed q k^T up to it */
    float *u;                            /* [CHUNK][width] */
    float *x;                            /* [CHUNK][largest of size and width] */
    float beta[CHUNK], total[CHUNK];     /* total: sum of g from the chunk's beginning on */
    float begun[CHUNK], left[CHUNK], q_factor[CHUNK], k_factor[CHUNK];
} Chunk;

static float *take(float **memory, long numbers) {
    float *taken = *memory;
    *memory += in_lanes(numbers);
    return taken;
}

static void read_chunk(const Pass *p, Chunk *c, long row, long head, long first, long n) {
    long size = p->size, width = p->width;
    float total = 0;
    c->n = n;
    c->lanes = in_lanes(n);
    for (long i = 0; i < n; i++) {
        long token = first + i;
        const void *q = place(p->q, row, token, head, p->half), *k = place(p->k, row, token, head, p->half);
        float scale = 1 / sqrtf((float)size);
        c->q_factor[i] = read_scaled(q, c->q + i * size, size, p->normed, scale, p->half);
        c->k_factor[i] = read_scaled(k, c->k + i * size, size, p->normed, 1, p->half);
        read_scaled(place(p->v, row, token, head, p->half), c->v + i * width, width, 0, 1, p->half);
        total += number(place(p->g, row, token, head, 0), 0, 0);
        c->total[i] = total;
        c->beta[i] = number(place(p->beta, row, token, head, p->half_beta), 0, p->half_beta);
    }
    for (long i = n; i < c->lanes; i++) {
        memset(c->q + i * size, 0, size * sizeof(float));
        memset(c->k + i * size, 0, size * sizeof(float));
        memset(c->v + i * width, 0, width * sizeof(float));
        memset(c->u + i * width, 0, width * sizeof(float));
        c->total[i] = total;
        c->beta[i] = 0;
    }
    for (long i = 0; i < c->lanes; i += LANES) {
        store_f32(c->begun + i, exponential(load_f32(c->total + i)));
        store_f32(c->left + i, exponential(same(total) - load_f32(c->total + i)));
    }
    transpose(c->k, size, c->lanes, size, c->kt, CHUNK);
    multiply(c->lanes, c->lanes, size, c->k, size, 1, c->kt, CHUNK, TILE_WIDTH, c->r, CHUNK, 0);
    multiply(c->lanes, c->lanes, size, c->q, size, 1, c->kt, CHUNK, TILE_WIDTH, c->p, CHUNK, 0);
    const i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (long i = 0; i < c->lanes; i++)
        for (long j = 0; j < c->lanes; j += LANES) {
            i16 number = lane + (int)j, upto = number <= (int)i, below = number < (int)i;
            /* Later tokens first become 0, since their decay may be infinite. */
            i16 span = (i16)(same(c->total[i]) - load_f32(c->total + j)) & upto;
            v16 decay = exponential((v16)span);
            v16 r = load_f32(c->r + i * CHUNK + j) * decay, own = load_f32(c->p + i * CHUNK + j) * decay;
            store_f32(c->r + i * CHUNK + j, (v16)((i16)r & below));
            store_f32(c->p + i * CHUNK + j, (v16)((i16)own & upto));
        }
}

/* to[i] = from[i] times factor[i], for rows of `width` numbers. */
INLINE void scaled(const float *from, const float *factor, long n, long width, float *to) {
    for (long i = 0; i < n; i++)
        for (long d = 0; d < width; d += LANES)
            store_f32(to + i * width + d, load_f32(from + i * width + d) * same(factor[i]));
}

/* (1 + beta r) u = u, in place; row by row, four earlier rows at a time. */
static void solve(const Chunk *c, float *u, long width) {
    for (long i = 1; i < c->n; i++) {
        float *own = u + i * width;
        float factors[CHUNK];
        for (long j = 0; j < i; j++) factors[j] = -c->beta[i] * c->r[i * CHUNK + j];
        for (long at = 0; at < width; at += 4 * LANES) {
            long vectors = least(width - at, 4 * LANES) / LANES;
            v16 sums[4];
            for (int w = 0; w < vectors; w++) sums[w] = load_f32(own + at + w * LANES);
            if (vectors == 4)
                for (long j = 0; j < i; j++) {
                    v16 factor = same(factors[j]);
#pragma GCC unroll 4
                    for (int w = 0; w < 4; w++) sums[w] += factor * load_f32(u + j * width + at + w * LANES);
                }
            else
                for (long j = 0; j < i; j++)
                    for (int w = 0; w < vectors; w++)
                        sums[w] += same(factors[j]) * load_f32(u + j * width + at + w * LANES);
            for (int w = 0; w < vectors; w++) store_f32(own + at + w * LANES, sums[w]);
        }
    }
}

/* (1 + beta r)^T u = u, in place. */
static void solve_transposed(const Chunk *c, float *u, long width) {
    for (long i = c->n - 2; i >= 0; i--) {
        float *own = u + i * width;
        float factors[CHUNK];
        for (long j = i + 1; j < c->n; j++) factors[j] = -c->beta[j] * c->r[j * CHUNK + i];
        for (long at = 0; at < width; at += 4 * LANES) {
            long vectors = least(width - at, 4 * LANES) / LANES;
            v16 sums[4];
            for (int w = 0; w < vectors; w++) sums[w] = load_f32(own + at + w * LANES);
            if (vectors == 4)
                for (long j = i + 1; j < c->n; j++) {
                    v16 factor = same(factors[j]);
#pragma GCC unroll 4
                    for (int w = 0; w < 4; w++) sums[w] += factor * load_f32(u + j * width + at + w * LANES);
                }
            else
                for (long j = i + 1; j < c->n; j++)
                    for (int w = 0; w < vectors; w++)
                        sums[w] += same(factors[j]) * load_f32(u + j * width + at + w * LANES);
            for (int w = 0; w < vectors; w++) store_f32(own + at + w * LANES, sums[w]);
        }
    }
}

/* u of a chunk, from the state before it. */
static void changes(const Pass *p, Chunk *c, const float *state) {
    long size = p->size, width = p->width;
    float factor[CHUNK];
    for (long i = 0; i < c->n; i++) factor[i] = -c->beta[i] * c->begun[i];
    scaled(c->k, factor, c->n, size, c->x);
    scaled(c->v, c->beta, c->n, width, c->u);
    multiply(c->n, width, size, c->x, size, 1, state, width, TILE_WIDTH, c->u, width, 1);
    solve(c, c->u, width);
}

/* The state after a chunk. */
static void move_on(const Pass *p, Chunk *c, const float *state, float *after) {
    long size = p->size, width = p->width;
    v16 decay = same(c->begun[c->n - 1]);
    for (long d = 0; d < size * width; d += LANES) store_f32(after + d, load_f32(state + d) * decay);
    scaled(c->k, c->left, c->n, size, c->x);
    multiply(size, width, c->n, c->x, 1, size, c->u, width, TILE_WIDTH, after, width, 1);
}

static void write_out(const Pass *p, Chunk *c, const float *state, float *out, long row, long head, long first) {
    long size = p->size, width = p->width;
    scaled(c->q, c->begun, c->n, size, c->x);
    multiply(c->n, width, size, c->x, size, 1, state, width, TILE_WIDTH, out, width, 0);
    multiply(c->n, width, c->n, c->p, CHUNK, 1, c->u, width, TILE_WIDTH, out, width, 1);
    for (long i = 0; i < c->n; i++) {
        long at = ((row * p->tokens + first + i) * p->heads + head) * width;
        for (long d = 0; d < width; d += LANES) store(p->out, at + d, load_f32(out + i * width + d), LANES, p->half);
    }
}

/* a[i] . b[i] */
INLINE float dot(const float *a, const float *b, long size) {
    v16 both = same(0);
    for (long d = 0; d < size; d += LANES) both += load_f32(a + d) * load_f32(b + d);
    return sum(both);
}

typedef struct {
    float *grad, *dq, *dk, *dx; /* of out, of normed q and k, and of the right side of the system */
    float *turned;              /* a matrix, transposed */
    float *squares, *other;     /* [CHUNK][CHUNK] */
} Back;

/* Gradients of a chunk; `onto` is that of the state after it, and becomes that of the state before it. */
static void chunk_backward(const Pass *p, Chunk *c, Back *b, const float *state, float *onto, long row, long head,
                           long first) {
    long n = c->n, lanes = c->lanes, size = p->size, width = p->width;
    float dtotal[CHUNK] = {0}, dbeta[CHUNK] = {0};
    for (long i = 0; i < n; i++)
        read_scaled(place(p->grad, row, first + i, head, p->half), b->grad + i * width, width, 0, 1, p->half);
    memset(b->grad + n * width, 0, (lanes - n) * width * sizeof(float));
    /* dU = P^T dO + (l K) dS', and through the system. */
    multiply(n, width, n, c->p, 1, CHUNK, b->grad, width, TILE_WIDTH, b->dx, width, 0);
    scaled(c->k, c->left, n, size, c->x);
    multiply(n, width, size, c->x, size, 1, onto, width, TILE_WIDTH, b->dx, width, 1);
    solve_transposed(c, b->dx, width);
    memset(b->dx + n * width, 0, (lanes - n) * width * sizeof(float));
    /* dP = dO U^T and dL = -dX U^T; `squares` and `other` take up their decay. */
    transpose(c->u, width, lanes, width, b->turned, CHUNK);
    multiply(n, lanes, width, b->grad, width, 1, b->turned, CHUNK, TILE_WIDTH, b->squares, CHUNK, 0);
    multiply(n, lanes, width, b->dx, width, 1, b->turned, CHUNK, TILE_WIDTH, b->other, CHUNK, 0);
    const i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (long i = 0; i < n; i++) {
        v16 mine = same(0), written = same(0);
        for (long j = 0; j < lanes; j += LANES) {
            long at = i * CHUNK + j;
            i16 number = lane + (int)j, upto = number <= (int)i, below = number < (int)i;
            i16 span = (i16)(same(c->total[i]) - load_f32(c->total + j)) & upto;
            v16 decay = exponential((v16)span);
            v16 dp = load_f32(b->squares + at), dr = -load_f32(b->other + at);
            v16 plain = dr * load_f32(c->r + at);
            v16 both = dp * load_f32(c->p + at) + same(c->beta[i]) * plain;
            written += plain;
            mine += both;
            store_f32(dtotal + j, load_f32(dtotal + j) - both);
            store_f32(b->squares + at, (v16)((i16)(dp * decay) & upto));
            store_f32(b->other + at, (v16)((i16)(dr * decay * same(c->beta[i])) & below));
        }
        dtotal[i] += sum(mine);
        dbeta[i] += sum(written);
    }
    multiply(n, size, n, b->squares, CHUNK, 1, c->k, size, TILE_WIDTH, b->dq, size, 0);
    multiply(n, size, n, b->squares, 1, CHUNK, c->q, size, TILE_WIDTH, b->dk, size, 0);
    multiply(n, size, n, b->other, CHUNK, 1, c->k, size, TILE_WIDTH, b->dk, size, 1);
    multiply(n, size, n, b->other, 1, CHUNK, c->k, size, TILE_WIDTH, b->dk, size, 1);
    /* Through what reads the state, S^T side by side with the tokens. */
    transpose(state, width, size, width, b->turned, size);
    multiply(n, size, width, b->grad, width, 1, b->turned, size, TILE_WIDTH, c->x, size, 0);
    for (long i = 0; i < n; i++) {
        float *own = c->x + i * size, *dq = b->dq + i * size;
        dtotal[i] += c->begun[i] * dot(own, c->q + i * size, size);
        for (long d = 0; d < size; d += LANES)
            store_f32(dq + d, load_f32(dq + d) + same(c->begun[i]) * load_f32(own + d));
    }
    multiply(n, size, width, b->dx, width, 1, b->turned, size, TILE_WIDTH, c->x, size, 0);
    for (long i = 0; i < n; i++) {
        float *own = c->x + i * size, *dk = b->dk + i * size, both = -c->begun[i] * dot(own, c->k + i * size, size);
        dbeta[i] += both + dot(b->dx + i * width, c->v + i * width, width);
        dtotal[i] += c->beta[i] * both;
        for (long d = 0; d < size; d += LANES)
            store_f32(dk + d, load_f32(dk + d) - same(c->begun[i] * c->beta[i]) * load_f32(own + d));
    }
    /* Through the state that is written. */
    transpose(onto, width, size, width, b->turned, size);
    multiply(n, size, width, c->u, width, 1, b->turned, size, TILE_WIDTH, c->x, size, 0);
    for (long i = 0; i < n; i++) {
        float *own = c->x + i * size, *dk = b->dk + i * size, both = c->left[i] * dot(own, c->k + i * size, size);
        dtotal[n - 1] += both;
        dtotal[i] -= both;
        for (long d = 0; d < size; d += LANES)
            store_f32(dk + d, load_f32(dk + d) + same(c->left[i]) * load_f32(own + d));
    }
    v16 kept = same(0), decay = same(c->begun[n - 1]);
    for (long d = 0; d < size * width; d += LANES) {
        v16 own = load_f32(onto + d) * decay;
        kept += own * load_f32(state + d);
        store_f32(onto + d, own);
    }
    dtotal[n - 1] += sum(kept);
    scaled(c->q, c->begun, n, size, c->x);
    multiply(size, width, n, c->x, 1, size, b->grad, width, TILE_WIDTH, onto, width, 1);
    float factor[CHUNK], sofar = 0;
    for (long i = 0; i < n; i++) factor[i] = -c->beta[i] * c->begun[i];
    scaled(c->k, factor, n, size, c->x);
    multiply(size, width, n, c->x, 1, size, b->dx, width, TILE_WIDTH, onto, width, 1);
    for (long i = n - 1; i >= 0; i--) {
        long at = (row * p->tokens + first + i) * p->heads + head;
        sofar += dtotal[i];
        p->dg[at] = sofar;
        p->dbeta[at] = dbeta[i];
        /* q and k were divided by their lengths; a q that is not has its factor all the same. */
        float *q = c->q + i * size, *k = c->k + i * size, *dq = b->dq + i * size, *dk = b->dk + i * size;
        float scale = (float)size, qq = p->normed ? dot(q, dq, size) * scale : 0, kk = p->normed ? dot(k, dk, size) : 0;
        for (long d = 0; d < size; d += LANES) {
            v16 gq = (load_f32(dq + d) - load_f32(q + d) * same(qq)) * same(c->q_factor[i]);
            v16 gk = (load_f32(dk + d) - load_f32(k + d) * same(kk)) * same(c->k_factor[i]);
            store(p->dq, at * size + d, gq, LANES, p->half);
            store(p->dk, at * size + d, gk, LANES, p->half);
        }
        for (long d = 0; d < width; d += LANES)
            store(p->dv, at * width + d, load_f32(b->dx + i * width + d) * same(c->beta[i]), LANES, p->half);
    }
}

static void task(const Pass *p, long row, long head, int backward) {
    long size = p->size, width = p->width, wide = size > width ? size : width, whole = size * width;
    long count = (p->tokens + CHUNK - 1) / CHUNK, length = (p->tokens + count - 1) / count;
    count = (p->tokens + length - 1) / length;
    long room = CHUNK * (2 * size + 2 * width + wide) + size * CHUNK + 2 * CHUNK * CHUNK + 2 * whole + CHUNK * width;
    if (backward) room += count * whole + CHUNK * (2 * size + 2 * width) + 2 * CHUNK * CHUNK + whole + wide * CHUNK;
    float *memory = malloc((room + 32 * LANES) * sizeof(float)), *rest = memory;
    if (!memory) abort();
    Chunk c = {0};
    c.q = take(&rest, CHUNK * size);
    c.k = take(&rest, CHUNK * size);
    c.v = take(&rest, CHUNK * width);
    c.u = take(&rest, CHUNK * width);
    c.x = take(&rest, CHUNK * wide);
    c.kt = take(&rest, size * CHUNK);
    c.r = take(&rest, CHUNK * CHUNK);
    c.p = take(&rest, CHUNK * CHUNK);
    float *out = take(&rest, CHUNK * width), *states = take(&rest, backward ? count * whole : 2 * whole);
    long place_of = row * p->heads + head;
    if (p->state) memcpy(states, p->state + place_of * whole, whole * sizeof(float));
    else memset(states, 0, whole * sizeof(float));
    for (long number = 0; number < count; number++) {
        long first = number * length, n = least(length, p->tokens - first), slot = backward ? number : number % 2;
        float *state = states + slot * whole, *after = states + (backward ? number + 1 : 1 - slot) * whole;
        int last = number == count - 1;
        if (backward && last) break; /* it is computed below */
        read_chunk(p, &c, row, head, first, n);
        changes(p, &c, state);
        if (!backward) write_out(p, &c, state, out, row, head, first);
        move_on(p, &c, state, last ? p->kept + place_of * whole : after);
    }
    if (backward) {
        Back b = {0};
        b.grad = take(&rest, CHUNK * width);
        b.dx = take(&rest, CHUNK * width);
        b.dq = take(&rest, CHUNK * size);
        b.dk = take(&rest, CHUNK * size);
        b.squares = take(&rest, CHUNK * CHUNK);
        b.other = take(&rest, CHUNK * CHUNK);
        b.turned = take(&rest, whole + wide * CHUNK);
        float *onto = take(&rest, whole);
        if (p->grad_kept) memcpy(onto, p->grad_kept + place_of * whole, whole * sizeof(float));
        else memset(onto, 0, whole * sizeof(float));
        for (long number = count - 1; number >= 0; number--) {
            long first = number * length, n = least(length, p->tokens - first);
            read_chunk(p, &c, row, head, first, n);
            changes(p, &c, states + number * whole);
            chunk_backward(p, &c, &b, states + number * whole, onto, row, head, first);
        }
        if (p->dstate) memcpy(p->dstate + place_of * whole, onto, whole * sizeof(float));
    }
    free(memory);
}

void delta_chunks(const Pass *p, int backward) {
    long tasks = p->rows * p->heads;
#pragma omp parallel for schedule(dynamic) num_threads(p->threads) if (p->threads > 1)
    for (long t = 0; t < tasks; t++) task(p, t / p->heads, t % p->heads, backward);
}
