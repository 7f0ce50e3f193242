// The operations of this folder in C++, for the CPU: attention, rotary positions, LayerNorm of a residual
// sum, dropout, and the loss over a vocabulary. They do the work between the large matrix products of a step.
//
// setup.py compiles this file when the package is installed, and native.py calls what is extern "C".
// A matrix (rows, columns) is stored row by row without gaps. Its numbers are float or bf16. bf16 is
// converted to float when it is read, and rounded when it is written. One thread computes a whole row,
// or a whole head of a sequence. So only sums over rows depend on the number of threads, and the same
// number of threads gives the same bits.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using std::int32_t;
using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;

constexpr int64_t FEW = 1 << 14;  // with fewer numbers than this, one thread is faster than two
constexpr int64_t IGNORED = -100;  // a target that does not count, as in torch.nn.functional

template <class To, class From>
inline To bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

struct bf16 {
    uint16_t word;
};

inline float read(float x) { return x; }
inline float read(bf16 x) { return bits<float>(uint32_t(x.word) << 16); }

inline void write(float& to, float x) { to = x; }
inline void write(bf16& to, float x) {  // rounds to nearest, ties to even
    uint32_t word = bits<uint32_t>(x);
    uint32_t rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16;
    to.word = uint16_t(x != x ? 0x7FC0 : rounded);
}

// exp(x) for x <= 0, within two units in the last place. It is 0 below -87, and NaN for NaN.
inline float exp_of(float x) {
    constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds a number to an integer
    float low = x < -87.0f ? -87.0f : x;
    float shifted = low * 1.44269504f + MAGIC;
    float n = shifted - MAGIC;
    float r = low - n * 0.693359375f + n * 2.12194440e-4f;  // x - n log 2, with log 2 split into two parts
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    float y = bits<float>(bits<uint32_t>(p) + ((bits<uint32_t>(shifted) - bits<uint32_t>(MAGIC)) << 23));
    return x < -87.0f ? 0.0f : x == x ? y : x;
}

// ------------------------------------------------------------------------------------- dropout

inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x85EBCA6B;
    x ^= x >> 13;
    x *= 0xC2B2AE35;
    return x ^ (x >> 16);
}

// Decides which elements dropout keeps: a hash of the seed, the row and the column, as in dropout.py.
// `of` gives the mask of one head of attention. `seed` may be null if the rate is 0.
struct Mask {
    uint32_t a, b, below;
    float scale;

    Mask(const int64_t* given, double rate) {
        uint64_t seed = given ? uint64_t(*given) : 0;
        uint32_t low = uint32_t(seed), high = uint32_t(seed >> 32);
        a = mix(mix(low ^ 0x243F6A88) ^ high);
        b = mix(mix(high ^ 0x85A308D3) ^ low);
        below = uint32_t(std::min(std::nearbyint(rate * 4294967296.0), 4294967295.0));
        scale = float(1.0 / (1.0 - rate));
    }

    Mask of(int64_t head) const {
        Mask mask = *this;
        mask.a = mix(a ^ uint32_t(head));
        mask.b = mix(b ^ uint32_t(head));
        return mask;
    }
};

struct Row {  // one row of a mask
    uint32_t a, b, below;
    float scale;

    Row(const Mask& mask, int64_t row)
        : a(mix(mask.a ^ uint32_t(row))),
          b(mix(mask.b ^ uint32_t(row))),
          below(mask.below),
          scale(mask.scale) {}

    float kept(float value, int64_t column) const {  // `value` if it is kept, else 0
        uint32_t x = a ^ uint32_t(column);
        x ^= x >> 16;
        x *= 0x85EBCA6B;
        x = x ^ (x >> 13) ^ b;
        x *= 0xC2B2AE35;
        x ^= x >> 16;
        return x >= below ? value : 0.0f;
    }

    float dropout(float value, int64_t column) const { return kept(value * scale, column); }
};

// out = dropout(x). The backward pass is the same function: it takes the gradient of out, and the same
// seed, and gives the gradient of x.
template <class T>
int dropout(const T* x, T* out, int64_t rows, int64_t columns, double rate, const int64_t* seed) {
    Mask mask(seed, rate);
#pragma omp parallel for schedule(static) if (rows * columns > FEW)
    for (int64_t r = 0; r < rows; r++) {
        Row row(mask, r);
        const T* i = x + r * columns;
        T* o = out + r * columns;
#pragma omp simd
        for (int64_t c = 0; c < columns; c++) write(o[c], row.dropout(read(i[c]), c));
    }
    return 0;
}

// ------------------------------------------------------------------------------------- attention

// One thread computes one head of one sequence of L tokens, in float, and its data stays in the cache.
// The rows and columns of the buffers are padded with zeros to whole tiles. D is the size of a head.

#ifdef __AVX512F__
constexpr int LANES = 16, TALL = 8;  // the sums (8 rows of two vectors) take 16 of the 32 registers
#else
constexpr int LANES = 8, TALL = 4;
#endif
constexpr int64_t BLOCK = 64;  // queries computed at once
typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));

inline int64_t whole(int64_t n, int64_t tile) { return (n + tile - 1) / tile * tile; }

inline Vector* row_of(float* c, int64_t m, int64_t cm) { return reinterpret_cast<Vector*>(c + m * cm); }

// Computes a tile of TALL rows and V vectors of the matrix product c = a b, or of c += a b if `add`.
// Element (m, k) of a is a[m * am + k * ak]. Vector v of row k of b starts at b + k * bk + v * bv. Row m
// of c starts at c + m * cm. `depth` is the number of rows of b.
template <int V>
inline void tile(const float* a, int64_t am, int64_t ak, const float* b, int64_t bk, int64_t bv,
                 float* c, int64_t cm, int64_t depth, bool add) {
    Vector sums[TALL][V];
#pragma GCC unroll 16
    for (int m = 0; m < TALL; m++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) sums[m][v] = add ? row_of(c, m, cm)[v] : Vector{};
    for (int64_t k = 0; k < depth; k++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
            Vector x = *reinterpret_cast<const Vector*>(b + k * bk + v * bv);
#pragma GCC unroll 16
            for (int m = 0; m < TALL; m++) sums[m][v] += a[m * am + k * ak] * x;
        }
#pragma GCC unroll 16
    for (int m = 0; m < TALL; m++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) row_of(c, m, cm)[v] = sums[m][v];
}

// The whole product, tile by tile. `rows` and `columns` are those of c, padded to whole tiles.
inline void product(const float* a, int64_t am, int64_t ak, const float* b, int64_t bk, int64_t bv,
                    float* c, int64_t cm, int64_t rows, int64_t columns, int64_t depth, bool add) {
    for (int64_t n = 0; n < columns;) {
        bool two = n + 2 * LANES <= columns;
        for (int64_t m = 0; m < rows; m += TALL) {
            auto run = two ? tile<2> : tile<1>;
            run(a + m * am, am, ak, b + n / LANES * bv, bk, bv, c + m * cm + n, cm, depth, add);
        }
        n += two ? 2 * LANES : LANES;
    }
}

// The buffers of one thread, with room for one head of the longest sequence.
struct Room {
    int64_t wide, rows, line;  // D and the longest length, padded to tiles; length of a row of scores
    std::vector<float> all;
    float *q, *k, *v, *d, *dq, *dk, *dv, *kt, *vt, *s, *ds;

    Room(int64_t longest, int64_t D) {
        wide = whole(D, LANES);
        rows = whole(longest, LANES);
        line = rows + LANES;  // not a power of two: such rows would compete for the same cache lines
        int64_t scores = whole(std::min(longest, BLOCK), TALL) * line;
        all.resize(9 * rows * wide + 2 * scores + 16);
        auto place = reinterpret_cast<std::uintptr_t>(all.data());
        float* next = all.data() + (-place & 63) / sizeof(float);
        for (float** buffer : {&q, &k, &v, &d, &dq, &dk, &dv, &kt, &vt}) {
            *buffer = next;
            next += rows * wide;
        }
        s = next;
        ds = s + scores;
    }
};

// Copies one head of L rows that are `stride` apart to (rows, wide), multiplied by `scale`.
template <class T>
void gather(const T* from, int64_t stride, int64_t L, int64_t D, float scale, int64_t rows, int64_t wide,
            float* to) {
    for (int64_t i = 0; i < L; i++) {
#pragma omp simd
        for (int64_t j = 0; j < D; j++) to[i * wide + j] = scale * read(from[i * stride + j]);
        std::fill(to + i * wide + D, to + (i + 1) * wide, 0.0f);
    }
    std::fill(to + L * wide, to + rows * wide, 0.0f);
}

// Copies q, k and v of one head from L rows of (3, H, D). q is multiplied by `scale`.
template <class T>
void gather_qkv(const T* from, int64_t L, int64_t H, int64_t D, float scale, Room& room) {
    int64_t stride = 3 * H * D, rows = whole(L, LANES);
    gather(from, stride, L, D, scale, rows, room.wide, room.q);
    gather(from + H * D, stride, L, D, 1, rows, room.wide, room.k);
    gather(from + 2 * H * D, stride, L, D, 1, rows, room.wide, room.v);
}

// Copies a head's L rows back to where rows are `stride` apart, multiplied by `scale`.
template <class T>
void scatter(const float* from, int64_t wide, int64_t L, int64_t D, float scale, T* to, int64_t stride) {
    for (int64_t i = 0; i < L; i++)
#pragma omp simd
        for (int64_t j = 0; j < D; j++) write(to[i * stride + j], scale * from[i * wide + j]);
}

// Transposes (rows, wide) into panels of (D, LANES), one for every LANES rows.
void transpose(const float* from, int64_t rows, int64_t D, int64_t wide, float* to) {
    for (int64_t i = 0; i < rows; i++) {
        float* panel = to + i / LANES * D * LANES + i % LANES;
        for (int64_t j = 0; j < D; j++) panel[j * LANES] = from[i * wide + j];
    }
}

// The length of the longest sequence. It is -1 if `ends` does not start at 0, ends above `tokens`, or
// has a sequence of negative length or longer than `limit`.
int64_t longest_of(const int32_t* ends, int64_t N, int64_t tokens, int64_t limit) {
    int64_t longest = 0;
    if (ends[0] != 0 || ends[N] > tokens) return -1;
    for (int64_t i = 0; i < N; i++) {
        int64_t length = int64_t(ends[i + 1]) - ends[i];
        if (length < 0 || length > limit) return -1;
        longest = std::max(longest, length);
    }
    return longest;
}

// The keys that a block of queries attends to, from `first` (the first of a vector) up to, not including,
// `end`. A query attends to `window` keys on each side of itself, or to all L keys if `window` is 0.
struct Reach {
    int64_t window, first, end;

    Reach(int64_t window, int64_t start, int64_t count, int64_t L)
        : window(window),
          first(window ? std::max<int64_t>(0, start - window) / LANES * LANES : 0),
          end(window ? std::min(L, start + count + window) : L) {}

    int64_t columns() const { return whole(end - first, LANES); }

    // Sets a row of scores, from key `first` on, to -infinity outside the window of a query.
    void hide(float* s, int64_t query) const {
        int64_t from = window ? std::max<int64_t>(0, query - window - first) : 0;
        int64_t to = (window ? std::min(end, query + window + 1) : end) - first;
        std::fill(s, s + from, -INFINITY);
        std::fill(s + to, s + columns(), -INFINITY);
    }
};

// out = dropout(softmax(q k^T / sqrt(D))) v for N packed sequences with T tokens and H heads. Sequence i
// is the rows from ends[i] up to, not including, ends[i + 1]. qkv is (T, 3, H, D) and out (T, H, D).
// Rows after the last sequence become 0. `sums` (T, H, 2) receives the largest score of each row, and
// 1 / the sum of its exponentials. `window` is explained at `Reach`. Returns 1, and writes nothing, if `ends`
// is wrong (see `longest_of`).
template <class T>
int attention(const T* qkv, const int32_t* ends, T* out, float* sums, int64_t tokens, int64_t N,
              int64_t H, int64_t D, int64_t limit, int64_t window, double rate, const int64_t* seed) {
    int64_t longest = longest_of(ends, N, tokens, limit);
    if (longest < 0) return 1;
    std::fill(out + ends[N] * H * D, out + tokens * H * D, T{});
    Mask mask(seed, rate);
    float scale = 1.0f / std::sqrt(float(D));
#pragma omp parallel
    {
        Room room(longest, D);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t i = 0; i < N; i++)
            for (int64_t h = 0; h < H; h++) {
                int64_t first = ends[i], L = ends[i + 1] - first, W = room.wide;
                int64_t rows = whole(L, LANES);
                gather_qkv(qkv + (first * 3 * H + h) * D, L, H, D, scale, room);
                transpose(room.k, rows, D, W, room.kt);
                Mask head = mask.of(h);
                for (int64_t start = 0; start < L; start += BLOCK) {
                    int64_t count = std::min(BLOCK, L - start), tall = whole(count, TALL);
                    Reach reach(window, start, count, L);
                    int64_t key = reach.first, columns = reach.columns();
                    product(room.q + start * W, W, 1, room.kt + key * D, LANES, D * LANES, room.s,
                            room.line, tall, columns, D, false);
                    for (int64_t r = 0; r < count; r++) {
                        float *s = room.s + r * room.line, top = -INFINITY, sum = 0.0f;
                        Row row(head, first + start + r);
                        reach.hide(s, start + r);
#pragma omp simd reduction(max : top)
                        for (int64_t c = 0; c < columns; c++) top = s[c] > top ? s[c] : top;
#pragma omp simd reduction(+ : sum)
                        for (int64_t c = 0; c < columns; c++) sum += s[c] = exp_of(s[c] - top);
                        float factor = 1.0f / sum;
                        if (mask.below) {
#pragma omp simd
                            for (int64_t c = 0; c < columns; c++)
                                s[c] = row.dropout(s[c] * factor, key + c);
                        } else {
#pragma omp simd
                            for (int64_t c = 0; c < columns; c++) s[c] *= factor;
                        }
                        float* kept = sums + 2 * ((first + start + r) * H + h);
                        kept[0] = top;
                        kept[1] = factor;
                    }
                    product(room.s, room.line, 1, room.v + key * W, W, LANES, room.d, W, tall, W,
                            reach.end - key, false);
                    scatter(room.d, W, count, D, 1, out + ((first + start) * H + h) * D, H * D);
                }
            }
    }
    return 0;
}

// The gradient of qkv, given that of out. Probabilities are recomputed from `sums` (Dao 2023, section 3).
template <class T>
int attention_backward(const T* qkv, const int32_t* ends, const float* sums, const T* d_out, T* d_qkv,
                       int64_t tokens, int64_t N, int64_t H, int64_t D, int64_t limit, int64_t window,
                       double rate, const int64_t* seed) {
    int64_t longest = longest_of(ends, N, tokens, limit);
    if (longest < 0) return 1;
    std::fill(d_qkv + ends[N] * 3 * H * D, d_qkv + tokens * 3 * H * D, T{});
    Mask mask(seed, rate);
    float scale = 1.0f / std::sqrt(float(D));
#pragma omp parallel
    {
        Room room(longest, D);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t i = 0; i < N; i++)
            for (int64_t h = 0; h < H; h++) {
                int64_t first = ends[i], L = ends[i + 1] - first, W = room.wide, line = room.line;
                int64_t rows = whole(L, LANES);
                gather_qkv(qkv + (first * 3 * H + h) * D, L, H, D, scale, room);
                gather(d_out + (first * H + h) * D, H * D, L, D, 1, rows, W, room.d);
                transpose(room.k, rows, D, W, room.kt);
                transpose(room.v, rows, D, W, room.vt);
                if (window) {  // a block adds only to the gradients of the keys in its reach
                    std::fill(room.dk, room.dk + rows * W, 0.0f);
                    std::fill(room.dv, room.dv + rows * W, 0.0f);
                }
                Mask head = mask.of(h);
                for (int64_t start = 0; start < L; start += BLOCK) {
                    int64_t count = std::min(BLOCK, L - start), tall = whole(count, TALL);
                    const float *q = room.q + start * W, *d = room.d + start * W;
                    Reach reach(window, start, count, L);
                    int64_t key = reach.first, columns = reach.columns();
                    const float *kt = room.kt + key * D, *vt = room.vt + key * D;
                    product(q, W, 1, kt, LANES, D * LANES, room.s, line, tall, columns, D, false);
                    product(d, W, 1, vt, LANES, D * LANES, room.ds, line, tall, columns, D, false);
                    for (int64_t r = 0; r < count; r++) {
                        float *s = room.s + r * line, *ds = room.ds + r * line, sum = 0.0f;
                        const float* kept = sums + 2 * ((first + start + r) * H + h);
                        float top = kept[0], factor = kept[1];
                        Row row(head, first + start + r);
                        reach.hide(s, start + r);
                        if (mask.below) {
#pragma omp simd reduction(+ : sum)
                            for (int64_t c = 0; c < columns; c++) {
                                float p = exp_of(s[c] - top) * factor, left = row.dropout(1.0f, key + c);
                                float g = ds[c] * left;
                                sum += p * g;
                                // the sign stores whether dropout kept it, for the loop below
                                s[c] = left > 0.0f ? p : -p;
                                ds[c] = g;
                            }
#pragma omp simd
                            for (int64_t c = 0; c < columns; c++) {
                                float p = std::fabs(s[c]);
                                ds[c] = p * (ds[c] - sum);
                                s[c] = s[c] < 0.0f ? 0.0f : p * head.scale;
                            }
                        } else {
#pragma omp simd reduction(+ : sum)
                            for (int64_t c = 0; c < columns; c++) {
                                s[c] = exp_of(s[c] - top) * factor;
                                sum += s[c] * ds[c];
                            }
#pragma omp simd
                            for (int64_t c = 0; c < columns; c++) ds[c] = s[c] * (ds[c] - sum);
                        }
                    }
                    bool add = window || start > 0;
                    float *dv = room.dv + key * W, *dk = room.dk + key * W, *dq = room.dq + start * W;
                    product(room.s, 1, line, d, W, LANES, dv, W, columns, W, count, add);
                    product(room.ds, 1, line, q, W, LANES, dk, W, columns, W, count, add);
                    product(room.ds, line, 1, room.k + key * W, W, LANES, dq, W, tall, W, reach.end - key,
                            false);
                }
                T* to = d_qkv + (first * 3 * H + h) * D;
                scatter(room.dq, W, L, D, scale, to, 3 * H * D);
                scatter(room.dk, W, L, D, 1, to + H * D, 3 * H * D);
                scatter(room.dv, W, L, D, 1, to + 2 * H * D, 3 * H * D);
            }
    }
    return 0;
}

// ------------------------------------------------------------------------------------- rotary positions

// out = qkv (T, 3, H, D) with queries and keys rotated: elements i and i + D / 2 of a head by angle i of
// their token. `cosines` and `sines` are (T, D / 2). `sign` -1 turns back, as the backward pass does.
template <class T>
int rotary(const T* qkv, const float* cosines, const float* sines, T* out, int64_t tokens, int64_t H,
           int64_t D, double sign) {
    int64_t half = D / 2;
#pragma omp parallel for schedule(static) if (tokens * H * D > FEW)
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cosines + t * half, *s = sines + t * half;
        const T* from = qkv + t * 3 * H * D;
        T* to = out + t * 3 * H * D;
        for (int64_t h = 0; h < 2 * H; h++) {
            const T *a = from + h * D, *b = a + half;
            T *x = to + h * D, *y = x + half;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float p = read(a[i]), q = read(b[i]), sine = float(sign) * s[i];
                write(x[i], p * c[i] - q * sine);
                write(y[i], q * c[i] + p * sine);
            }
        }
        std::copy(from + 2 * H * D, from + 3 * H * D, to + 2 * H * D);
    }
    return 0;
}

// ------------------------------------------------------------------------------------- LayerNorm

// z = x + dropout(y) and out = LayerNorm(z). `moments` (rows, 2) holds each row's mean and
// 1 / sqrt(variance + eps).
template <class T>
int add_norm(const float* x, const T* y, const float* weight, const float* bias, float* z, float* out,
              float* moments, int64_t rows, int64_t columns, double eps, double rate, const int64_t* seed) {
    Mask mask(seed, rate);
#pragma omp parallel for schedule(static) if (rows * columns > FEW)
    for (int64_t r = 0; r < rows; r++) {
        Row row(mask, r);
        const float* a = x + r * columns;
        const T* b = y + r * columns;
        float *s = z + r * columns, *o = out + r * columns, sum = 0.0f, squares = 0.0f;
        if (mask.below) {
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < columns; c++) sum += s[c] = a[c] + row.dropout(read(b[c]), c);
        } else {
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < columns; c++) sum += s[c] = a[c] + read(b[c]);
        }
        float mean = sum / columns;
#pragma omp simd reduction(+ : squares)
        for (int64_t c = 0; c < columns; c++) squares += (s[c] - mean) * (s[c] - mean);
        float factor = 1.0f / std::sqrt(squares / columns + float(eps));
#pragma omp simd
        for (int64_t c = 0; c < columns; c++) o[c] = (s[c] - mean) * factor * weight[c] + bias[c];
        moments[2 * r] = mean;
        moments[2 * r + 1] = factor;
    }
    return 0;
}

// The gradients of x, y, weight and bias, given those of out and z. d_z may be null, and d_y may be d_x.
template <class T>
int add_norm_backward(const float* d_out, const float* d_z, const float* z, const float* moments,
                       const float* weight, float* d_x, T* d_y, float* d_weight, float* d_bias,
                       int64_t rows, int64_t columns, double rate, const int64_t* seed) {
    Mask mask(seed, rate);
    bool many = rows * columns > FEW;
    int threads = many ? omp_get_max_threads() : 1;
    std::vector<float> sums(2 * columns * threads, 0.0f);
#pragma omp parallel num_threads(threads) if (many)
    {
        float* dw = sums.data() + 2 * columns * omp_get_thread_num();
        float* db = dw + columns;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            Row row(mask, r);
            const float *d = d_out + r * columns, *s = z + r * columns;
            float *dx = d_x + r * columns, mean = moments[2 * r], factor = moments[2 * r + 1];
            T* dy = d_y + r * columns;
            float one = 0.0f, two = 0.0f;
#pragma omp simd reduction(+ : one, two)
            for (int64_t c = 0; c < columns; c++) {
                float n = (s[c] - mean) * factor, g = d[c] * weight[c];
                dw[c] += d[c] * n;
                db[c] += d[c];
                one += g;
                two += g * n;
            }
            one /= columns;
            two /= columns;
            const float* more = d_z ? d_z + r * columns : nullptr;
#pragma omp simd
            for (int64_t c = 0; c < columns; c++) {
                float n = (s[c] - mean) * factor;
                dx[c] = factor * (d[c] * weight[c] - one - n * two) + (more ? more[c] : 0.0f);
            }
            if (mask.below) {
#pragma omp simd
                for (int64_t c = 0; c < columns; c++) write(dy[c], row.dropout(dx[c], c));
            } else if (static_cast<void*>(dx) != static_cast<void*>(dy)) {
#pragma omp simd
                for (int64_t c = 0; c < columns; c++) write(dy[c], dx[c]);
            }
        }
    }
    for (int64_t c = 0; c < columns; c++) {
        float w = 0.0f, b = 0.0f;
        for (int t = 0; t < threads; t++) {
            w += sums[2 * columns * t + c];
            b += sums[2 * columns * t + columns + c];
        }
        d_weight[c] = w;
        d_bias[c] = b;
    }
    return 0;
}

// -------------------------------------------------------------------------------- the vocabulary

// The cross-entropy of each row of logits with its target. The rows of `logits` are `stride` apart and
// do not include the bias yet. Each is replaced by its gradient, softmax minus target, and by 0 after the
// last column. `hits` receives 1 if the target is the first of the largest logits, else 0. Rows from
// `valid` on are padding, and so are rows with the target IGNORED: their gradient is 0. The sums of the
// gradient over rows are added to d_bias. Returns 1, and writes nothing, if another target is not one of
// the columns.
template <class T>
int cross_entropy(T* logits, const float* bias, const int64_t* targets, float* losses, float* hits,
                  float* d_bias, int64_t rows, int64_t valid, int64_t columns, int64_t stride) {
    for (int64_t r = 0; r < valid; r++)
        if (targets[r] != IGNORED && (targets[r] < 0 || targets[r] >= columns)) return 1;
    int threads = omp_get_max_threads();
    std::vector<float> sums(columns * threads, 0.0f);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> buffer(columns);
        float *e = buffer.data(), *db = sums.data() + columns * omp_get_thread_num();
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            T* row = logits + r * stride;
            std::memset(row + columns, 0, (stride - columns) * sizeof(T));
            if (r >= valid || targets[r] == IGNORED) {
                std::memset(row, 0, columns * sizeof(T));
                continue;
            }
            int64_t target = targets[r];
            float top = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : top)
            for (int64_t c = 0; c < columns; c++) {
                e[c] = read(row[c]) + bias[c];
                top = e[c] > top ? e[c] : top;
            }
            float right = e[target];
            bool hit = right == top;
            for (int64_t c = 0; hit && c < target; c++) hit = e[c] != top;
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < columns; c++) sum += e[c] = exp_of(e[c] - top);
            float factor = 1.0f / sum;
            e[target] -= sum;
#pragma omp simd
            for (int64_t c = 0; c < columns; c++) {
                float g = e[c] * factor;
                db[c] += g;
                write(row[c], g);
            }
            losses[r] = std::log(sum) + top - right;
            hits[r] = hit;
        }
#pragma omp for schedule(static)
        for (int64_t c = 0; c < columns; c++)
            for (int t = 0; t < threads; t++) d_bias[c] += sums[columns * t + c];
    }
    return 0;
}

}  // namespace

// ------------------------------------------------------------------------- what native.py calls

#define EXPORT(NAME)                                           \
    void* NAME##_float = reinterpret_cast<void*>(NAME<float>); \
    void* NAME##_bfloat16 = reinterpret_cast<void*>(NAME<bf16>);

extern "C" {
// Defined by setup.py: the checksum of this file, the processor's features, and the build's checksum.
const char* xformer_source = XFORMER_SOURCE;
const char* xformer_processor = XFORMER_PROCESSOR;
const char* xformer_build = XFORMER_BUILD;

EXPORT(dropout)
EXPORT(attention)
EXPORT(attention_backward)
EXPORT(rotary)
EXPORT(add_norm)
EXPORT(add_norm_backward)
EXPORT(cross_entropy)
}
