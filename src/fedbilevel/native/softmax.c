/* Minibatch steps of a linear layer under a softmax, as one call of XLA.

   For each client, with the weights W and the bias b of the layer, and with rows r of the t-th minibatch,

       W <- W - Σ_r m_r (softmax(W φ_r + b) - k_r) φ_rᵀ - rate ∇R(W) - C                    b the same, with 1 and c

   for t = 1, ..., T. It is what `heads.Softmax._walk` does with operations of XLA, where the two products of a step are
   too small for its library and too large to be free. The gradient of the regulariser R is W, or W / sqrt(||W||² + s²).

   The operands may have leading axes, those of clients and of runs, which are one where all have the same value. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

typedef struct {
    int64_t classes, features, all; /* of the layer; and the rows of the client */
    int64_t steps, rows;            /* minibatches, and the rows of one */
    int64_t even, wide, size, room; /* classes, features, and twice rows, rounded up to what the loops do at once */
    int biased, norm;
    float smoothing; /* s² */
} Sizes;

typedef struct {
    const float *weight, *bias, *known, *drift, *drift_b, *features, *shares;
    const int32_t *index;
    const uint8_t *active;
    float rate, *made, *made_b;
} Client;

typedef float Four __attribute__((vector_size(16)));

static inline float slope(const Sizes *z, float square) {
    if (!z->norm) return 1.0f;
    float root = sqrtf(square + z->smoothing);
    return root == 0 ? 0 : 1 / root; /* not a number stays so */
}

#define LANES 4
#define TARGET
#define NAME(x) x##_plain
#include "walk.h"
#undef LANES
#undef TARGET
#undef NAME
#if defined(__x86_64__)
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#define NAME(x) x##_avx2
#include "walk.h"
#undef LANES
#undef TARGET
#undef NAME
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define NAME(x) x##_avx512
#include "walk.h"
#endif

const char *fedbilevel_jaxlib(void) { return JAXLIB; } /* the version whose headers are used here */

typedef void Walk(const Sizes *, const Client *, float *);

/* The loop for this processor. A kind of 1, 2 or 3 asks for one of the three; NULL if this processor does not have it. */
static Walk *walk_of(int32_t kind) {
#if defined(__x86_64__)
    int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    int half = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (kind == 3 || (kind == 0 && wide)) return wide ? walk_avx512 : NULL;
    if (kind == 2 || (kind == 0 && half)) return half ? walk_avx2 : NULL;
#else
    if (kind > 1) return NULL;
#endif
    return walk_plain;
}

static int64_t up(int64_t number, int64_t to) { return (number + to - 1) / to * to; }

static XLA_FFI_Error *failed(const XLA_FFI_Api *api, XLA_FFI_Error_Code code, const char *why) {
    XLA_FFI_Error_Create_Args args = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE, .message = why, .errc = code};
    return api->XLA_FFI_Error_Create(&args);
}

static const void *number(const XLA_FFI_Attrs *attrs, const char *name) {
    for (int64_t i = 0; i < attrs->size; i++) {
        if (attrs->names[i]->len == strlen(name) && !memcmp(attrs->names[i]->ptr, name, strlen(name)))
            return ((const XLA_FFI_Scalar *)attrs->attrs[i])->value;
    }
    return NULL;
}

enum { WEIGHT, BIAS, KNOWN, DRIFT, DRIFT_B, FEATURES, INDEX, SHARES, ACTIVE, RATE, OPERANDS };
static const int OWN[OPERANDS] = {2, 1, 2, 2, 1, 2, 2, 2, 1, 0}; /* the axes of an operand without the leading ones */

XLA_FFI_Error *fedbilevel_softmax_walk(XLA_FFI_CallFrame *frame) {
    if (frame->extension_start != NULL && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
        XLA_FFI_Metadata *about = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
        about->api_version.major_version = XLA_FFI_API_MAJOR;
        about->api_version.minor_version = XLA_FFI_API_MINOR;
        return NULL;
    }
    const XLA_FFI_Api *api = frame->api;
    const void *norm = number(&frame->attrs, "norm"), *smoothing = number(&frame->attrs, "smoothing");
    const void *kind = number(&frame->attrs, "kind");
    if (frame->args.size != OPERANDS || frame->rets.size != 2 || !norm || !smoothing || !kind)
        return failed(api, XLA_FFI_Error_Code_INVALID_ARGUMENT, "softmax_walk: wrong operands");
    Walk *walk = walk_of(*(const int32_t *)kind);
    if (walk == NULL) return failed(api, XLA_FFI_Error_Code_UNIMPLEMENTED, "softmax_walk: not with this processor");
    const XLA_FFI_Buffer *in[OPERANDS], *out[2] = {frame->rets.rets[0], frame->rets.rets[1]};
    int64_t lead = out[0]->rank - 2, count = 1;
    for (int64_t i = 0; i < lead; i++) count *= out[0]->dims[i];
    for (int i = 0; i < OPERANDS; i++) {
        in[i] = frame->args.args[i];
        if (in[i]->rank != lead + OWN[i])
            return failed(api, XLA_FFI_Error_Code_INVALID_ARGUMENT, "softmax_walk: an operand has the wrong number of axes");
    }
    const int64_t *layer = in[WEIGHT]->dims + lead, *index = in[INDEX]->dims + lead;
    Sizes z = {.classes = layer[0], .features = layer[1], .all = in[FEATURES]->dims[lead], .steps = index[0], .rows = index[1]};
    z.even = up(z.classes, 2), z.wide = up(z.features, 16), z.size = up(z.rows, 5), z.room = up(z.size, 16);
    z.biased = in[BIAS]->dims[lead] > 0, z.norm = *(const int32_t *)norm, z.smoothing = *(const float *)smoothing;
    size_t numbers = (size_t)(2 * z.even * z.wide + z.size * z.wide + 2 * z.even * z.room + z.room + z.even);
    float *room = aligned_alloc(64, (numbers * sizeof *room + 63) / 64 * 64);
    if (room == NULL) return failed(api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "softmax_walk: no memory");
    for (int64_t n = 0; n < count; n++) {
        int64_t at[OPERANDS];
        for (int i = 0; i < OPERANDS; i++) {
            int64_t place = 0, rest = n, step = 1, own = 1;
            for (int64_t axis = lead - 1; axis >= 0; axis--) {
                int64_t here = rest % out[0]->dims[axis];
                rest /= out[0]->dims[axis];
                if (in[i]->dims[axis] > 1) place += here * step;
                step *= in[i]->dims[axis];
            }
            for (int axis = 0; axis < OWN[i]; axis++) own *= in[i]->dims[lead + axis];
            at[i] = place * own;
        }
#define AT(type, i) ((const type *)in[i]->data + at[i])
        Client client = {
            .weight = AT(float, WEIGHT), .bias = AT(float, BIAS), .known = AT(float, KNOWN), .drift = AT(float, DRIFT),
            .drift_b = AT(float, DRIFT_B), .features = AT(float, FEATURES), .shares = AT(float, SHARES),
            .index = AT(int32_t, INDEX), .active = AT(uint8_t, ACTIVE), .rate = *AT(float, RATE),
            .made = (float *)out[0]->data + n * z.classes * z.features,
            .made_b = (float *)out[1]->data + n * (z.biased ? z.classes : 0),
        };
        walk(&z, &client, room);
    }
    free(room);
    return NULL;
}
