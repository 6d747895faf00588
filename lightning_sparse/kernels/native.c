/* The hard threshold, the addition of payloads and the move of weights on a CPU, each in one pass over memory; see
   native.py.

   Plain C that compilers vectorise, with groups of elements in local arrays, which do not overlap. Without contraction
   and reassociation it gives the bits of the tensor operations that run without a compiler. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define BLOCK_SHIFT 16 /* blocks of a payload have 65,536 elements */
#define GROUP 64       /* elements processed together; each group lies in one block */
#define STREAM_SHARE 256 /* if more than 1 / 256 of values are selected, writing past the caches is slower */
#define INLINE static inline __attribute__((always_inline))

enum wire { WIRE_FLOAT32, WIRE_BFLOAT16, WIRE_FLOAT8, WIRE_INT8 }; /* int8: for average only */

/* The work of the hard threshold on one bucket: of gradients, p = e + g / S; of drifts, p = x - w, and e' is kept in the
   weights: w = x - e'. */
typedef struct {
    const float *before;    /* e, or the anchor x. NULL: zeros */
    float *after;           /* e'; may be e. Not for drifts. NULL: not written */
    float *gradient;        /* g. Not for drifts */
    float *const *parts;    /* w: tensors that together hold the bucket's weights. NULL: gradients */
    const int64_t *part_ends;
    float *weights;         /* the current part */
    int64_t weights_start;
    float *dense;           /* receives selected values, and zeros elsewhere; may be g. NULL: use the payload */
    void *values;           /* of the payload: `capacity` encoded values */
    uint16_t *offsets;      /* `capacity` offsets */
    int32_t *ends;          /* one for each block */
    int64_t capacity;
    int64_t *slices;        /* selected coordinates of each slice */
    int64_t slice_elements; /* 0: no slices */
    int64_t selected;       /* coordinates so far, written or not */
    int64_t non_finite;     /* selected values that are NaN or infinite */
    double squares;         /* the sum of e'^2, as if all selected values were sent */
    float largest;          /* the largest |p|; NaN is larger than all other values */
    float loss_scale;       /* S; 1 changes no bit */
    float divisor;          /* of dense values */
    float scale;            /* a value is its number on the wire times this power of two */
    int32_t wire;
    int32_t clears;         /* whether to leave zeros in the gradient */
} task_t;

/* Returns the code of the nearest e4m3 to a finite p, half to even, without the sign, at most 448. */
INLINE uint32_t nearest_float8(float p) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: a sum with it has no fraction */
    float magnitude = fabsf(p) < 448.0f ? fabsf(p) : 448.0f;
    uint32_t bits;
    memcpy(&bits, &magnitude, sizeof bits);
    if (magnitude < 0.015625f) return (uint32_t)((magnitude * 512.0f + magic) - magic); /* not normal */
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120u << 3);
}

/* Returns the finite number of a code of `nearest_float8`. */
INLINE float magnitude_of_float8(uint32_t code) {
    uint32_t bits = (code << 20) + (120u << 23);
    float p;
    memcpy(&p, &bits, sizeof p);
    return code < 8 ? (float)code / 512.0f : p;
}

INLINE uint16_t to_bfloat16(float p) {
    const float limit = 3.3895313892515355e38f; /* finite values stay finite */
    if (p > limit && !isinf(p)) p = limit;
    if (p < -limit && !isinf(p)) p = -limit;
    uint32_t bits;
    memcpy(&bits, &p, sizeof bits);
    if (p != p) return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

INLINE float from_bfloat16(uint16_t code) {
    uint32_t bits = (uint32_t)code << 16;
    float p;
    memcpy(&p, &bits, sizeof p);
    return p;
}

/* e4m3, which has no infinity. */
INLINE uint8_t to_float8(float p, float scale) {
    if (!isfinite(p)) return 0x7F;
    return (uint8_t)(nearest_float8(p * (1.0f / scale)) | (signbit(p) ? 0x80 : 0)); /* scaled exactly */
}

INLINE float from_float8(uint8_t code, float scale) {
    float p = (code & 0x7F) == 0x7F ? NAN : magnitude_of_float8(code & 0x7F);
    return (code & 0x80 ? -p : p) * scale;
}

INLINE void put(float p, void *values, int64_t place, int32_t wire, float scale) {
    if (wire == WIRE_FLOAT32) ((float *)values)[place] = p;
    if (wire == WIRE_BFLOAT16) ((uint16_t *)values)[place] = to_bfloat16(p);
    if (wire == WIRE_FLOAT8) ((uint8_t *)values)[place] = to_float8(p, scale);
}

INLINE float get(const void *values, int64_t place, int32_t wire, float scale) {
    if (wire == WIRE_FLOAT32) return ((const float *)values)[place];
    if (wire == WIRE_BFLOAT16) return from_bfloat16(((const uint16_t *)values)[place]);
    if (wire == WIRE_FLOAT8) return from_float8(((const uint8_t *)values)[place], scale);
    int8_t steps = ((const int8_t *)values)[place];
    return steps == INT8_MIN ? NAN : (float)steps * scale; /* the lowest encodes non-finite values */
}

/* The rule of a selected value: returns the value at the other end, and in kept the rest, 0 for a value that is not
   finite. sent_and_kept in selection/bucket.py (tensors) and in kernels/values.py (Triton) give the same bits. */
INLINE float sent_and_kept(float p, float excess, int32_t wire, float scale, float *kept) {
    float value = p > 0.0f ? p + excess : p - excess, sent = value;
    if (wire == WIRE_BFLOAT16) sent = from_bfloat16(to_bfloat16(value));
    if (wire == WIRE_FLOAT8) sent = from_float8(to_float8(value, scale), scale);
    float rest = p - sent;
    *kept = isfinite(rest) ? rest : 0.0f;
    return sent;
}

INLINE float *weights_at(const task_t *task, int64_t place) { return task->weights + (place - task->weights_start); }

/* Forms p of `count` elements, and 0 for the rest of the group. Updates `largest`. Returns whether all |p| are below
   the threshold. */
INLINE int form(task_t *task, int64_t begin, int64_t count, float threshold, float *p) {
    static const float zeros[GROUP];
    const float *before = task->before ? task->before + begin : zeros, scale = task->loss_scale;
    uint32_t bits[GROUP], of_group = 0, so_far, least;
    if (count < GROUP) memset(p, 0, GROUP * sizeof *p);
    if (task->weights) {
        const float *weights = weights_at(task, begin);
        for (int64_t j = 0; j < count; j++) p[j] = before[j] - weights[j];
    } else {
        const float *gradient = task->gradient + begin;
        if (scale == 1.0f)
            for (int64_t j = 0; j < count; j++) p[j] = before[j] + gradient[j];
        else
            for (int64_t j = 0; j < count; j++) p[j] = before[j] + gradient[j] / scale;
    }
    /* Magnitudes have the order of their bits, with NaN above infinity. */
    memcpy(bits, p, sizeof bits);
    memcpy(&least, &threshold, sizeof least);
    memcpy(&so_far, &task->largest, sizeof so_far);
    for (int j = 0; j < GROUP; j++) of_group = (bits[j] & 0x7FFFFFFF) > of_group ? bits[j] & 0x7FFFFFFF : of_group;
    if (of_group > so_far) memcpy(&task->largest, &of_group, sizeof of_group);
    return of_group < least;
}

/* Writes a group past the caches, which saves reading the memory first. */
INLINE void stream(float *to, const float *group, int64_t count) {
#ifdef __SSE2__
    if (count == GROUP && ((uintptr_t)to & 15) == 0) {
        for (int j = 0; j < GROUP; j += 4) _mm_stream_ps(to + j, _mm_loadu_ps(group + j));
        return;
    }
#endif
    memcpy(to, group, count * sizeof *to);
}

/* Counts a selected value and writes it into the payload if it fits. Returns the remainder of a sent value, also if it
   does not fit. */
INLINE float send(task_t *task, float p, float excess, int64_t place) {
    int64_t at = task->selected++;
    float kept, sent = sent_and_kept(p, excess, task->wire, task->scale, &kept);
    task->non_finite += !isfinite(p);
    if (task->slice_elements) task->slices[place / task->slice_elements]++;
    if (at < task->capacity) {
        put(sent, task->values, at, task->wire, task->scale);
        task->offsets[at] = (uint16_t)place;
        if (task->weights) *weights_at(task, place) = task->before[place] - kept;
    }
    return kept;
}

/* Adds the squares of a whole group in double, to a quarter as many sums. */
INLINE void add_squares(double *sums, const float *group) {
    for (int j = 0; j < GROUP / 4; j++) {
        double a = group[j], b = group[j + GROUP / 4], c = group[j + GROUP / 2], d = group[j + 3 * GROUP / 4];
        sums[j] += a * a + b * b + (c * c + d * d);
    }
}

/* Writes a group into the payload. A value beyond the capacity stays in e' as p. */
INLINE void pack_group(task_t *task, int64_t begin, int64_t count, float threshold, float excess, double *squares) {
    float p[GROUP], below[GROUP];
    const int all_below = form(task, begin, count, threshold, p), is_gradient = !task->weights;
    const int streams = task->selected * STREAM_SHARE <= begin;
    float *kept_values = streams ? p : task->after + begin;
    if (is_gradient && !streams) memcpy(kept_values, p, count * sizeof *p);
    if (all_below) {
        add_squares(squares, p);
    } else {
        uint8_t hit[GROUP] = {0};
        uint64_t words[GROUP / 8];
        for (int j = 0; j < count; j++) hit[j] = !(fabsf(p[j]) < threshold);
        for (int j = 0; j < GROUP; j++) below[j] = hit[j] ? 0.0f : p[j];
        add_squares(squares, below);
        memcpy(words, hit, sizeof words);
        for (int word = 0; word < GROUP / 8; word++) {
            for (uint64_t marks = words[word]; marks; marks &= marks - 1) {
                int j = word * 8 + (__builtin_ctzll(marks) >> 3); /* bytes are 0 or 1, the first is the lowest */
                int has_capacity = task->selected < task->capacity;
                float kept = send(task, p[j], excess, begin + j);
                squares[0] += (double)kept * kept;
                if (is_gradient && has_capacity) kept_values[j] = kept;
            }
        }
    }
    if (is_gradient && streams) stream(task->after + begin, p, count);
    if (task->clears) memset(task->gradient + begin, 0, count * sizeof *p);
    task->ends[begin >> BLOCK_SHIFT] = (int32_t)task->selected;
}

/* Writes a group into the dense tensor, divided. */
INLINE void mask_group(task_t *task, int64_t begin, int64_t count, float threshold, float excess, int32_t wire,
                       double *squares) {
    float p[GROUP], sent[GROUP] = {0};
    int hits[GROUP], selected = 0, non_finite = 0;
    if (!form(task, begin, count, threshold, p)) {
        for (int j = 0; j < count; j++) {
            float kept, value = sent_and_kept(p[j], excess, wire, task->scale, &kept) / task->divisor;
            int hit = hits[j] = !(fabsf(p[j]) < threshold);
            selected += hit;
            non_finite += !isfinite(p[j]);
            sent[j] = hit ? value : 0.0f;
            p[j] = hit ? kept : p[j];
        }
        if (task->weights) {
            const float *anchor = task->before + begin;
            float *weights = weights_at(task, begin);
            for (int64_t j = 0; j < count; j++) weights[j] = hits[j] ? anchor[j] - p[j] : weights[j];
        }
    }
    task->selected += selected;
    task->non_finite += non_finite;
    if (task->after) stream(task->after + begin, p, count);
    memcpy(task->dense + begin, sent, count * sizeof *sent);
    add_squares(squares, p);
}

/* Walks through [start, end) group by group. */
INLINE void walk(task_t *task, int64_t start, int64_t end, float threshold, float excess, int is_dense, int32_t wire) {
    double squares[GROUP / 4] = {0};
    for (int64_t begin = start, count; begin < end; begin += count) {
        count = GROUP - begin % GROUP < end - begin ? GROUP - begin % GROUP : end - begin;
        if (!is_dense && count == GROUP) pack_group(task, begin, GROUP, threshold, excess, squares);
        else if (!is_dense) pack_group(task, begin, count, threshold, excess, squares);
        else if (count == GROUP) mask_group(task, begin, GROUP, threshold, excess, wire, squares);
        else mask_group(task, begin, count, threshold, excess, wire, squares);
    }
    for (int j = 0; j < GROUP / 4; j++) task->squares += squares[j];
}

/* Not inlined, because a second copy would double the time to compile. */
static __attribute__((noinline)) void walk_as(task_t *task, int64_t start, int64_t end, float threshold, float excess) {
    const int32_t wire = task->wire; /* a constant in each branch, so that compilers vectorise */
    if (!task->dense) walk(task, start, end, threshold, excess, 0, wire);
    else if (wire == WIRE_FLOAT32) walk(task, start, end, threshold, excess, 1, WIRE_FLOAT32);
    else if (wire == WIRE_BFLOAT16) walk(task, start, end, threshold, excess, 1, WIRE_BFLOAT16);
    else walk(task, start, end, threshold, excess, 1, WIRE_FLOAT8);
}

/* Takes values of at least the threshold out of [start, end); sent values exceed p by excess. */
void take_out(task_t *task, int64_t start, int64_t end, float threshold, float excess) {
    if (!task->parts) {
        task->weights = 0;
        walk_as(task, start, end, threshold, excess);
        return;
    }
    int64_t part = 0;
    while (start < end) {
        for (; task->part_ends[part] <= start; part++) {}
        int64_t until = task->part_ends[part] < end ? task->part_ends[part] : end;
        task->weights = task->parts[part];
        task->weights_start = part ? task->part_ends[part - 1] : 0;
        walk_as(task, start, until, threshold, excess);
        start = until;
    }
}

/* Payloads of a bucket, one from each worker. */
typedef struct {
    const char *const *rows;   /* the payload of each worker */
    const int64_t *capacities; /* of each payload */
    int64_t num_payloads, num_blocks;
    int64_t ends_at, values_at, value_bytes; /* where ends and values begin, and the bytes of a value; offsets follow */
    float scale;
    int32_t wire;
    int32_t by_senders; /* whether sums are divided by the number of nonzero values, instead of that of payloads */
} payloads_t;

typedef struct {
    const void *values;
    const uint16_t *places;
    int64_t first, last;
} block_t;

/* Returns the part of a payload for a block. */
INLINE block_t part_of(const payloads_t *all, int64_t rank, int64_t block) {
    const int32_t *ends = (const int32_t *)(all->rows[rank] + all->ends_at);
    const char *values = all->rows[rank] + all->values_at;
    const int64_t capacity = all->capacities[rank], of_values = capacity * all->value_bytes;
    const uint16_t *offsets = (const uint16_t *)(values + of_values + of_values % 2);
    return (block_t){values, offsets, block ? ends[block - 1] : 0, ends[block] < capacity ? ends[block] : capacity};
}

/* Adds a block of all payloads, in rank order, and counts the nonzero values. A block stays in the cache. */
INLINE void add_block(const payloads_t *all, int64_t block, float *sums, uint16_t *senders) {
    for (int64_t rank = 0; rank < all->num_payloads; rank++) {
        block_t part = part_of(all, rank, block);
        for (int64_t k = part.first; k < part.last; k++) {
            const float value = get(part.values, k, all->wire, all->scale);
            sums[part.places[k]] += value;
            senders[part.places[k]] += value != 0.0f;
        }
    }
}

/* Returns the divisor of a sum, and clears its senders, so that another payload with this place divides by 1. */
INLINE float take_divisor(const payloads_t *all, uint16_t *senders) {
    const float divisor = !*senders ? 1.0f : all->by_senders ? (float)*senders : (float)all->num_payloads;
    *senders = 0;
    return divisor;
}

/* Adds payloads to zeros, and divides the sums by the number of payloads or of senders. */
void average(const payloads_t *all, float *out) {
    uint16_t senders[1 << BLOCK_SHIFT] = {0};
    for (int64_t block = 0; block < all->num_blocks; block++) {
        float *sums = out + (block << BLOCK_SHIFT);
        add_block(all, block, sums, senders);
        for (int64_t rank = 0; rank < all->num_payloads; rank++) {
            block_t part = part_of(all, rank, block);
            for (int64_t k = part.first; k < part.last; k++)
                sums[part.places[k]] /= take_divisor(all, &senders[part.places[k]]);
        }
    }
}

/* Subtracts the average of payloads from an anchor and from weights, only where a worker sent a value. `sums` are
   zeros, and become zeros again: as many as a block has elements. */
void subtract(const payloads_t *all, float *sums, float *anchor, float *const *parts, const int64_t *part_ends) {
    uint16_t senders[1 << BLOCK_SHIFT] = {0};
    int64_t first = 0;
    for (int64_t block = 0; block < all->num_blocks; block++) {
        const int64_t start = block << BLOCK_SHIFT;
        for (; part_ends[first] <= start; first++) {}
        add_block(all, block, sums, senders);
        for (int64_t rank = 0; rank < all->num_payloads; rank++) {
            block_t part_of_rank = part_of(all, rank, block);
            int64_t part = first;
            for (int64_t k = part_of_rank.first; k < part_of_rank.last; k++) {
                const int64_t place = start + part_of_rank.places[k];
                float *sum = &sums[part_of_rank.places[k]];
                const float mean = *sum / take_divisor(all, &senders[part_of_rank.places[k]]);
                *sum = 0.0f; /* so that another worker's value at the same place subtracts nothing more */
                for (; part_ends[part] <= place; part++) {}
                anchor[place] -= mean;
                parts[part][place - (part ? part_ends[part - 1] : 0)] -= mean;
            }
        }
    }
}
