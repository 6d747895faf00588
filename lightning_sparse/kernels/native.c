/* The hard threshold and the adding up of payloads on a CPU, each in one pass; see native.py.

   Plain C, which compilers make vector code of. No contraction, no reassociation but what is written out: the same bits
   as the tensor operations that do it where there is no compiler. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK_SHIFT 16 /* of a payload: 65,536 elements */
#define GROUP 64       /* elements that are looked at together */
#if defined(__AVX512F__)
#define LANES 16 /* of the processor's own vectors: compilers take wider ones apart, some into single elements */
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define FOLD 4096      /* squares are summed up in float for so many */

#pragma GCC diagnostic ignored "-Wpsabi" /* how they are handed over concerns only functions that are inlined */

/* Vectors of LANES, as wide as those of the processor; loaded and stored at any place. */
typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

enum wire { WIRE_FLOAT32, WIRE_BFLOAT16, WIRE_FLOAT16, WIRE_FLOAT8, WIRE_INT8 }; /* int8: to add up alone */

static uint16_t to_bfloat16(float p) {
    const float limit = 3.3895313892515355e38f; /* finite values stay finite */
    if (p > limit && !isinf(p)) p = limit;
    if (p < -limit && !isinf(p)) p = -limit;
    uint32_t bits;
    memcpy(&bits, &p, sizeof bits);
    if (p != p) return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static float of_bfloat16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float p;
    memcpy(&p, &bits, sizeof p);
    return p;
}

/* The nearest float16, half to even; what is finite stays finite. */
static uint16_t to_float16(float p) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: what is added to it loses its fraction */
    float magnitude = fabsf(p);
    uint32_t bits, code;
    if (magnitude < 6.103515625e-5f) {
        code = (uint32_t)((magnitude * 16777216.0f + magic) - magic);
    } else if (isfinite(p)) {
        if (magnitude > 65504.0f) magnitude = 65504.0f;
        memcpy(&bits, &magnitude, sizeof bits);
        code = ((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) - (112 << 10);
    } else {
        code = p != p ? 0x7E00 : 0x7C00;
    }
    return (uint16_t)(code | (signbit(p) ? 0x8000 : 0));
}

static float of_float16(uint16_t code) {
    uint32_t magnitude = code & 0x7FFF, bits = (magnitude << 13) + (112u << 23);
    float p;
    memcpy(&p, &bits, sizeof p);
    if (magnitude < 0x400) p = (float)magnitude / 16777216.0f;
    if (magnitude >= 0x7C00) p = magnitude > 0x7C00 ? NAN : INFINITY;
    return code & 0x8000 ? -p : p;
}

/* The nearest e4m3 of p / scale within its range, half to even; NaN where p is not finite. */
static uint8_t to_float8(float p, float scale) {
    const float magic = 12582912.0f, limit = 448.0f;
    if (!isfinite(p)) return 0x7F;
    float scaled = p * (1.0f / scale), magnitude = fabsf(scaled); /* a power of two: exact */
    uint32_t bits, code;
    if (magnitude > limit) magnitude = limit;
    if (magnitude < 0.015625f) {
        code = (uint32_t)((magnitude * 512.0f + magic) - magic);
    } else {
        memcpy(&bits, &magnitude, sizeof bits);
        code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3);
    }
    return (uint8_t)(code | (signbit(scaled) ? 0x80 : 0));
}

static float of_float8(uint8_t code, float scale) {
    uint32_t magnitude = code & 0x7F, bits = (magnitude << 20) + (120u << 23);
    float p;
    if (magnitude == 0x7F) return NAN;
    memcpy(&p, &bits, sizeof p);
    if (magnitude < 8) p = (float)magnitude / 512.0f;
    return (code & 0x80 ? -p : p) * scale;
}

typedef struct {
    void *values;          /* capacity of them, as the wire has them */
    uint16_t *offsets;     /* likewise */
    int32_t *ends;         /* one for each block of the payload */
    int64_t capacity;
    int32_t wire;
    float scale;           /* of values that are multiples of a step, a power of two */
    int64_t selected;      /* so far, written or not */
    int64_t non_finite;    /* of them */
    double squares;        /* of what is kept */
    int64_t slice_elements; /* 0 for none */
    int64_t *slices;       /* how many are selected in each */
} payload_t;

/* A value as it comes out at the other end. */
static inline float rounded(float p, int32_t wire, float scale) {
    if (wire == WIRE_BFLOAT16) return of_bfloat16(to_bfloat16(p));
    if (wire == WIRE_FLOAT16) return of_float16(to_float16(p));
    if (wire == WIRE_FLOAT8) return of_float8(to_float8(p, scale), scale);
    return p;
}

/* All bits where abs(p) < threshold, which NaN is not. */
static inline __attribute__((always_inline)) ints is_below(floats p, float threshold) { return (p < threshold) & (p > -threshold); }

static inline __attribute__((always_inline)) int all(ints mask) {
    int32_t found = -1;
    for (int l = 0; l < LANES; l++) found &= mask[l];
    return found;
}

/* The rule of a selected value: returns what comes out at the other end, and in kept what stays; nothing stays of a
   value that is not finite. sent_and_kept in selection/residual.py (for tensors) and in kernels/threshold.py (for
   Triton) are the same rule with the same bits. */
static inline float sent_and_kept(float p, int32_t wire, float scale, float *kept) {
    float sent = rounded(p, wire, scale), rest = p - sent;
    *kept = isfinite(rest) ? rest : 0.0f;
    return sent;
}

/* sent_and_kept of LANES values, of which those that are selected have a meaning: compilers do not make vectors of it. */
static inline __attribute__((always_inline)) floats
lanes_sent_and_kept(floats p, ints selected, int32_t wire, float scale, floats *kept) {
    floats sent = p;
    if (wire == WIRE_BFLOAT16) { /* all lanes: without a branch these are vectors */
        for (int l = 0; l < LANES; l++) sent[l] = rounded(p[l], wire, scale);
    } else if (wire != WIRE_FLOAT32 && !all(~selected)) {
        for (int l = 0; l < LANES; l++)
            if (selected[l]) sent[l] = rounded(p[l], wire, scale);
    }
    *kept = p - sent;
    *kept = (floats)((ints)*kept & is_below(*kept, INFINITY));
    return sent;
}

static int is_zero(const float *values, int64_t count) {
    uint32_t found = 0, bits;
    for (int64_t j = 0; j < count; j++) {
        memcpy(&bits, values + j, sizeof bits);
        found |= bits << 1; /* without the sign */
    }
    return !found;
}

/* Adds squares that were summed up in float, and clears them. Where float is too narrow they are formed again in double:
   of what is kept, and of what is left of coordinates that found no room after so many as were written before. */
static void fold(floats *squares, const float *after, int64_t begin, int64_t end, float threshold, int64_t written,
                 payload_t *out) {
    double sum = 0;
    for (int j = 0; j < LANES; j++) sum += (*squares)[j];
    *squares = (floats){0};
    if (!isfinite(sum) || (sum < 1e-29 && !is_zero(after + begin, end - begin))) {
        int64_t last = out->selected < out->capacity ? out->selected : out->capacity;
        sum = 0;
        for (int64_t j = begin; j < end; j++) {
            float kept = after[j];
            if (written < last && out->offsets[written] == (uint16_t)j)
                written++;
            else if (!(fabsf(after[j]) < threshold))
                sent_and_kept(after[j], out->wire, out->scale, &kept);
            sum += (double)kept * kept;
        }
    }
    out->squares += sum;
}

static inline void put(float p, payload_t *out) {
    int64_t place = out->selected;
    if (out->wire == WIRE_FLOAT32)
        ((float *)out->values)[place] = p;
    else if (out->wire == WIRE_BFLOAT16)
        ((uint16_t *)out->values)[place] = to_bfloat16(p);
    else if (out->wire == WIRE_FLOAT16)
        ((uint16_t *)out->values)[place] = to_float16(p);
    else
        ((uint8_t *)out->values)[place] = to_float8(p, out->scale);
}

static inline float get(const void *values, int64_t place, int32_t wire, float scale) {
    if (wire == WIRE_FLOAT32) return ((const float *)values)[place];
    if (wire == WIRE_BFLOAT16) return of_bfloat16(((const uint16_t *)values)[place]);
    if (wire == WIRE_FLOAT16) return of_float16(((const uint16_t *)values)[place]);
    if (wire == WIRE_FLOAT8) return of_float8(((const uint8_t *)values)[place], scale);
    int8_t steps = ((const int8_t *)values)[place];
    return steps == INT8_MIN ? NAN : (float)steps * scale; /* the lowest stands for what is not finite */
}

/* Sends one element as far as there is room; returns what is kept of it. */
static inline float send(float p, int64_t place, payload_t *out, float *after) {
    float kept;
    sent_and_kept(p, out->wire, out->scale, &kept);
    out->non_finite += !isfinite(p);
    if (out->selected < out->capacity) {
        put(p, out);
        out->offsets[out->selected] = (uint16_t)place;
        *after = kept;
    }
    out->selected++;
    if (out->slice_elements) out->slices[place / out->slice_elements]++;
    return kept;
}

/* Sends the marked elements of a group, eight marks at a time, of which most hold none. */
static void send_group(float *after, int64_t begin, const uint64_t *words, floats *squares, payload_t *out) {
    for (int word = 0; word < GROUP / 8; word++) {
        for (uint64_t marks = words[word]; marks; marks &= marks - 1) {
            int64_t place = begin + word * 8 + (__builtin_ctzll(marks) >> 3); /* of bytes that are 0 or 1 */
            float kept = send(after[place], place, out, after + place);
            (*squares)[0] += kept * kept;
        }
    }
}

static inline __attribute__((always_inline)) floats load(const float *place) { return *(const floats *)place; }

static inline __attribute__((always_inline)) void store(float *place, floats values) { *(floats *)place = values; }

static inline __attribute__((always_inline)) void
walk(const float *before, float *after, float *gradient, float scale, int has_scale, int clears, int64_t start,
     int64_t end, float threshold, payload_t *out) {
    floats squares = {0};
    int64_t folded = start, written = out->selected;
    for (int64_t begin = start; begin < end;) {
        /* Groups begin at multiples of GROUP, so that none lies in two blocks. */
        int64_t count = GROUP - begin % GROUP;
        if (count > end - begin) count = end - begin;
        floats of_group = {0};
        int all_below = 0;
        if (count == GROUP) {
            ints below = of_group == of_group;
            for (int j = 0; j < GROUP; j += LANES) {
                floats g = load(gradient + begin + j);
                if (has_scale) g /= scale;
                floats p = load(before + begin + j) + g;
                store(after + begin + j, p);
                if (clears) store(gradient + begin + j, (floats){0});
                below &= is_below(p, threshold);
                of_group += p * p;
            }
            all_below = all(below);
        } else {
            for (int64_t j = begin; j < begin + count; j++) {
                after[j] = before[j] + (has_scale ? gradient[j] / scale : gradient[j]);
                if (clears) gradient[j] = 0.0f;
            }
        }
        if (all_below) {
            squares += of_group;
        } else {
            uint8_t hit[GROUP] = {0};
            uint64_t words[GROUP / 8];
            if (count == GROUP) {
                for (int j = 0; j < GROUP; j += LANES) {
                    floats p = load(after + begin + j);
                    ints below = is_below(p, threshold);
                    p = (floats)((ints)p & below);
                    squares += p * p;
                    for (int l = 0; l < LANES; l++) hit[j + l] = 1 + below[l];
                }
            } else {
                for (int64_t j = 0; j < count; j++) {
                    float p = after[begin + j];
                    hit[j] = !(fabsf(p) < threshold);
                    squares[j % LANES] += hit[j] ? 0.0f : p * p;
                }
            }
            memcpy(words, hit, sizeof words);
            send_group(after, begin, words, &squares, out);
        }
        out->ends[begin >> BLOCK_SHIFT] = (int32_t)out->selected;
        begin += count;
        if (begin % FOLD == 0 || begin == end) {
            fold(&squares, after, folded, begin, threshold, written, out);
            folded = begin, written = out->selected;
        }
    }
}

/* Takes what reaches the threshold out of [start, end) of a bucket: p = e + g / S into after, e' where it was sent. */
void take_out(const float *before, float *after, float *gradient, float scale, int32_t has_scale, int32_t clears,
              int64_t start, int64_t end, float threshold, payload_t *out) {
    if (has_scale)
        walk(before, after, gradient, scale, 1, clears, start, end, threshold, out);
    else if (clears)
        walk(before, after, gradient, 1.0f, 0, 1, start, end, threshold, out);
    else
        walk(before, after, gradient, 1.0f, 0, 0, start, end, threshold, out);
}

/* The same into a dense tensor, divided, with zeros between; out may be the gradient's memory. */
static inline __attribute__((always_inline)) void
walk_masked(const float *before, float *after, const float *gradient, float scale, int has_scale, float *dense,
            float divisor, int wire, int64_t start, int64_t end, float threshold, payload_t *out) {
    floats squares = {0};
    ints selected = {0}, non_finite = {0};
    int64_t folded = start;
    for (int64_t begin = start; begin < end;) {
        int64_t count = end - begin < LANES ? end - begin : LANES;
        floats p = {0}, sent, kept;
        if (count == LANES) {
            floats g = load(gradient + begin);
            if (has_scale) g /= scale;
            p = load(before + begin) + g;
        } else {
            for (int64_t j = 0; j < count; j++) {
                float g = gradient[begin + j];
                p[j] = before[begin + j] + (has_scale ? g / scale : g);
            }
        }
        ints below = is_below(p, threshold), finite = is_below(p, INFINITY);
        for (int64_t j = count; j < LANES; j++) below[j] = -1; /* beyond the end: 0 reaches a threshold of 0 */
        sent = lanes_sent_and_kept(p, ~below, wire, out->scale, &kept);
        kept = (floats)(((ints)p & below) | ((ints)kept & ~below));
        sent = (floats)((ints)sent & ~below) / divisor;
        squares += kept * kept;
        selected += ~below; /* each -1 */
        non_finite += ~finite;
        if (count == LANES) {
            store(after + begin, kept);
            store(dense + begin, sent);
        } else {
            for (int64_t j = 0; j < count; j++) after[begin + j] = kept[j], dense[begin + j] = sent[j];
        }
        begin += count;
        if (begin - folded >= FOLD || begin == end) {
            fold(&squares, after, folded, begin, INFINITY, 0, out);
            folded = begin;
            for (int l = 0; l < LANES; l++) out->selected -= selected[l], out->non_finite -= non_finite[l];
            selected = non_finite = (ints){0};
        }
    }
}

void take_out_masked(const float *before, float *after, const float *gradient, float scale, int32_t has_scale,
                     float *dense, float divisor, int64_t start, int64_t end, float threshold, payload_t *out) {
    if (has_scale || out->wire != WIRE_FLOAT32)
        walk_masked(before, after, gradient, scale, has_scale, dense, divisor, out->wire, start, end, threshold, out);
    else
        walk_masked(before, after, gradient, 1.0f, 0, dense, divisor, WIRE_FLOAT32, start, end, threshold, out);
}

/* Adds payloads to zeros, in rank order, and divides what is there by their number; block by block, as a block stays in
   the cache. Each payload is row bytes after the one before it. */
void average(const char *ends, const char *values, const char *offsets, int64_t row, int64_t num_payloads,
             int64_t capacity, int32_t wire, float scale, float *out, int64_t num_blocks) {
    const float divisor = (float)num_payloads;
    for (int64_t block = 0; block < num_blocks; block++) {
        uint64_t divided[(1 << BLOCK_SHIFT) / 64];
        float *part = out + (block << BLOCK_SHIFT);
        memset(divided, 0, sizeof divided);
        for (int pass = 0; pass < 2; pass++) {
            for (int64_t rank = 0; rank < num_payloads; rank++) {
                const int32_t *of_blocks = (const int32_t *)(ends + rank * row);
                const uint16_t *place = (const uint16_t *)(offsets + rank * row);
                const void *value = values + rank * row;
                int64_t first = block ? of_blocks[block - 1] : 0, last = of_blocks[block];
                if (last > capacity) last = capacity;
                for (int64_t k = first; k < last; k++) {
                    uint64_t bit = 1ull << (place[k] % 64);
                    if (pass == 0) {
                        part[place[k]] += get(value, k, wire, scale);
                    } else if (!(divided[place[k] / 64] & bit)) { /* once, though several may have sent it */
                        divided[place[k] / 64] |= bit;
                        part[place[k]] /= divisor;
                    }
                }
            }
        }
    }
}
