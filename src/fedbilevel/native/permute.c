/* Permutations as NumPy's generators draw them, for many keys of Philox in one call.

   `Generator(Philox(key=key)).permutation(rows)`, `count` times for each key, bit for bit: Philox4x64-10 of Salmon et al.
   (2011), whose counter begins at one, gives 64 bits at a time. A number of 32 bits is the lower half of such a word, and
   the next one its upper half. As many of its bits as a limit has are taken, and rejected if they are above the limit.
   The shuffle of Fisher and Yates goes from the last place to the second. */

#include <stdint.h>
#include <string.h>

#define BLOCKS 4 /* blocks of Philox that are computed at once, as they do not wait for each other */

static inline uint64_t product(uint64_t a, uint64_t b, uint64_t *high) {
    unsigned __int128 whole = (unsigned __int128)a * b;
    *high = (uint64_t)(whole >> 64);
    return (uint64_t)whole;
}

/* The words of some blocks of Philox, from a counter on. */
static void philox(const uint64_t *key, uint64_t counter, uint32_t *words) {
    for (int block = 0; block < BLOCKS; block++) {
        uint64_t c0 = counter + block, c1 = 0, c2 = 0, c3 = 0, k0 = key[0], k1 = key[1];
        for (int round = 0; round < 10; round++) {
            uint64_t high0, high1;
            uint64_t low0 = product(0xD2E7470EE14C6C93u, c0, &high0), low1 = product(0xCA5A826395121157u, c2, &high1);
            c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
            k0 += 0x9E3779B97F4A7C15u, k1 += 0xBB67AE8584CAA73Bu;
        }
        uint64_t made[4] = {c0, c1, c2, c3};
        for (int i = 0; i < 4; i++) {
            words[8 * block + 2 * i] = (uint32_t)made[i];
            words[8 * block + 2 * i + 1] = (uint32_t)(made[i] >> 32);
        }
    }
}

/* made[k][c][:width] is the c-th permutation of key k, cut to the width; what is behind `rows` is left as it is. Its
   numbers have 1, 2 or 4 bytes. `order` has room for `rows` numbers. `mask` has the bits of i and all bits below them. */
void fedbilevel_permutations(const uint64_t *keys, int64_t number, int64_t count, int32_t rows, int64_t width,
                             int32_t bytes, int32_t *order, void *made) {
    uint32_t words[8 * BLOCKS];
    int64_t taken = rows < width ? rows : width;
    uint8_t *into = made;
    for (int64_t k = 0; k < number; k++) {
        uint64_t counter = 1;
        const uint32_t *next = words + 8 * BLOCKS;
        for (int64_t c = 0; c < count; c++, into += width * bytes) {
            for (int32_t i = 0; i < rows; i++) order[i] = i;
            uint32_t i = rows > 0 ? (uint32_t)rows - 1 : 0, mask = UINT32_MAX >> 1;
            for (; i > 0; mask >>= 1) {
                while (i > mask >> 1) {
                    if (next == words + 8 * BLOCKS) {
                        philox(keys + 2 * k, counter, words);
                        counter += BLOCKS, next = words;
                    }
                    uint32_t drawn = *next++ & mask;
                    uint32_t fits = drawn <= i; /* without a branch, which nobody could predict */
                    uint32_t j = fits ? drawn : i;
                    int32_t kept = order[i];
                    order[i] = order[j];
                    order[j] = kept;
                    i -= fits;
                }
            }
            if (bytes == 1) {
                for (int64_t n = 0; n < taken; n++) into[n] = (uint8_t)order[n];
            } else if (bytes == 2) {
                uint16_t *halves = (uint16_t *)into;
                for (int64_t n = 0; n < taken; n++) halves[n] = (uint16_t)order[n];
            } else {
                memcpy(into, order, (size_t)taken * 4);
            }
        }
    }
}
