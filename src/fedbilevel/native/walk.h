/* A local loop of a linear layer under a softmax, for one kind of processor: included once for each.

   LANES is how many numbers an operation of the processor has, TARGET says which operations it may use, and NAME(x)
   makes a name for them. What is computed is told in `softmax.c`. */

typedef float NAME(Floats) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(Ints) __attribute__((vector_size(4 * LANES)));
#define Floats NAME(Floats)
#define Ints NAME(Ints)

TARGET static inline Floats NAME(load)(const float *from) {
    Floats made;
    memcpy(&made, from, sizeof made);
    return made;
}

TARGET static inline void NAME(store)(float *to, Floats made) { memcpy(to, &made, sizeof made); }

TARGET static inline float NAME(sum)(Floats all) {
    union { Floats all; Four fours[LANES / 4]; } parts = {all};
    Four total = parts.fours[0];
    for (int i = 1; i < LANES / 4; i++) total += parts.fours[i];
    return (total[0] + total[2]) + (total[1] + total[3]);
}

TARGET static inline Floats NAME(where)(Ints which, Floats one, Floats other) {
    return (Floats)(((Ints)one & which) | ((Ints)other & ~which));
}

/* exp(x) for x <= 0, to the last bit or the one before it. It is 2^n exp(r) with |r| <= log(2) / 2. */
TARGET static inline Floats NAME(exp)(Floats x) {
    const Floats zero = {0};
    x = NAME(where)(x < -87.0f, zero - 87.0f, x); /* what is smaller is as good as zero; not a number stays so */
    Floats turns = x * 1.44269504f + 12582912.0f; /* rounded to a whole number in the last bits */
    Ints n = (Ints)turns;
    turns -= 12582912.0f;
    Floats r = x - turns * 0.693359375f + turns * 2.12194440e-4f;
    Floats p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (Floats)((n << 23) + 0x3f800000); /* the bits above those of n are shifted out */
}

/* s[c][r] = <w[c], x[r]>, for two classes and five rows at a time. */
TARGET static void NAME(scores)(const Sizes *z, const float *w, const float *x, float *s) {
    const int64_t wide = z->wide;
    for (int64_t c = 0; c < z->classes; c += 2) {
        const float *one = w + c * wide, *other = one + wide;
        for (int64_t r = 0; r < z->size; r += 5) {
            const float *x0 = x + r * wide, *x1 = x0 + wide, *x2 = x1 + wide, *x3 = x2 + wide, *x4 = x3 + wide;
            Floats a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, a4 = {0}, b0 = {0}, b1 = {0}, b2 = {0}, b3 = {0}, b4 = {0};
            for (int64_t f = 0; f < wide; f += LANES) {
                Floats u = NAME(load)(one + f), v = NAME(load)(other + f), row;
                row = NAME(load)(x0 + f), a0 += u * row, b0 += v * row;
                row = NAME(load)(x1 + f), a1 += u * row, b1 += v * row;
                row = NAME(load)(x2 + f), a2 += u * row, b2 += v * row;
                row = NAME(load)(x3 + f), a3 += u * row, b3 += v * row;
                row = NAME(load)(x4 + f), a4 += u * row, b4 += v * row;
            }
            float *to = s + c * z->room + r, *next = to + z->room;
            to[0] = NAME(sum)(a0), to[1] = NAME(sum)(a1), to[2] = NAME(sum)(a2), to[3] = NAME(sum)(a3), to[4] = NAME(sum)(a4);
            next[0] = NAME(sum)(b0), next[1] = NAME(sum)(b1), next[2] = NAME(sum)(b2), next[3] = NAME(sum)(b3), next[4] = NAME(sum)(b4);
        }
    }
}

/* s[c][r] becomes (softmax over c of s[c][r] + b[c], less k[c][r]) m[r]. */
TARGET static void NAME(surplus)(const Sizes *z, const float *b, const float *k, const float *m, float *s) {
    for (int64_t r = 0; r < z->room; r += LANES) {
        Floats most = NAME(load)(s + r) + b[0], total = {0};
        for (int64_t c = 1; c < z->classes; c++) {
            Floats own = NAME(load)(s + c * z->room + r) + b[c];
            most = NAME(where)((own > most) | (own != own), own, most);
        }
        for (int64_t c = 0; c < z->classes; c++) {
            Floats own = NAME(exp)(NAME(load)(s + c * z->room + r) + b[c] - most);
            total += own;
            NAME(store)(s + c * z->room + r, own);
        }
        Floats share = NAME(load)(m + r);
        for (int64_t c = 0; c < z->classes; c++) {
            float *own = s + c * z->room + r;
            NAME(store)(own, (NAME(load)(own) / total - NAME(load)(k + c * z->room + r)) * share);
        }
    }
}

/* w[c] <- keep w[c] - drift[c] - sum over r of d[c][r] x[r]; returns the sum of squares. */
TARGET static float NAME(move)(const Sizes *z, float keep, const float *drift, const float *d, const float *x, float *w) {
    Floats square = {0};
    for (int64_t c = 0; c < z->classes; c += 2) {
        const float *one = d + c * z->room, *other = one + z->room;
        for (int64_t f = 0; f < z->wide; f += LANES) {
            float *first = w + c * z->wide + f, *second = first + z->wide;
            Floats a = NAME(load)(first) * keep - NAME(load)(drift + c * z->wide + f);
            Floats b = NAME(load)(second) * keep - NAME(load)(drift + (c + 1) * z->wide + f);
            for (int64_t r = 0; r < z->rows; r++) {
                Floats row = NAME(load)(x + r * z->wide + f);
                a -= row * one[r];
                b -= row * other[r];
            }
            NAME(store)(first, a);
            NAME(store)(second, b);
            square += a * a + b * b;
        }
    }
    return NAME(sum)(square);
}

/* All steps of one client. `room` is scratch memory. */
TARGET static void NAME(walk)(const Sizes *z, const Client *o, float *room) {
    float *w = room, *drift = w + z->even * z->wide, *x = drift + z->even * z->wide;
    float *s = x + z->size * z->wide, *k = s + z->even * z->room, *m = k + z->even * z->room, *b = m + z->room;
    memset(room, 0, (size_t)(b - room) * sizeof *room);
    float square = 0, square_b = 0;
    for (int64_t c = 0; c < z->classes; c++) {
        for (int64_t f = 0; f < z->features; f++) {
            float own = o->weight[c * z->features + f];
            w[c * z->wide + f] = own, square += own * own;
            drift[c * z->wide + f] = o->drift[c * z->features + f];
        }
        b[c] = z->biased ? o->bias[c] : 0.0f;
        square_b += b[c] * b[c];
    }
    for (int64_t t = 0; t < z->steps; t++) {
        if (!o->active[t]) continue;
        for (int64_t r = 0; r < z->rows; r++) {
            int32_t row = o->index[t * z->rows + r];
            row = row < 0 ? 0 : row < z->all ? row : (int32_t)z->all - 1;
            memcpy(x + r * z->wide, o->features + row * z->features, (size_t)z->features * sizeof *x);
            for (int64_t c = 0; c < z->classes; c++) k[c * z->room + r] = o->known[row * z->classes + c];
            m[r] = o->shares[t * z->rows + r];
        }
        NAME(scores)(z, w, x, s);
        NAME(surplus)(z, b, k, m, s);
        square = NAME(move)(z, 1.0f - o->rate * slope(z, square), drift, s, x, w);
        if (!z->biased) continue;
        float keep = 1.0f - o->rate * slope(z, square_b);
        square_b = 0;
        for (int64_t c = 0; c < z->classes; c++) {
            float total = 0;
            for (int64_t r = 0; r < z->rows; r++) total += s[c * z->room + r];
            b[c] = b[c] * keep - o->drift_b[c] - total;
            square_b += b[c] * b[c];
        }
    }
    for (int64_t c = 0; c < z->classes; c++) {
        memcpy(o->made + c * z->features, w + c * z->wide, (size_t)z->features * sizeof *w);
        if (z->biased) o->made_b[c] = b[c];
    }
}

#undef Floats
#undef Ints
