// Products of a warpgroup (wgmma) of operands in shared memory, in 128-byte swizzle.
//
// An operand is stored in panels of 64 values, 128 bytes, of each of its rows: row r of a panel at 128 r,
// its 16-byte chunk c at place c ^ (r % 8). Panels start at multiples of 1024 bytes. D lies in the
// registers of the 128 threads as the instruction has it: of rows `lane / 4` (and + 8) of the 16 rows of
// a warp, columns `8 j + 2 (lane % 4)` and the next are d[4 j], d[4 j + 1] (and d[4 j + 2], d[4 j + 3]).
#pragma once

#include "kv_common.cuh"

// How the hardware finds an operand. panels: bytes from one panel to the next, where a product spans
// several of them across its rows (`values`).
DEVICE u64 operand(u32 shared, u32 panels) {
    constexpr u64 SWIZZLE_128 = 1ull << 62;
    constexpr u64 EIGHT_ROWS = u64(1024 >> 4) << 32;
    return SWIZZLE_128 | EIGHT_ROWS | u64(panels >> 4) << 16 | (shared & 0x3ffff) >> 4;
}

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// What reads or writes these registers stays on its side of this.
template <int N>
DEVICE void settle(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// What this thread wrote to shared memory is there for products and the copy engine.
DEVICE void writes_visible_to_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Operands 0 to 31 or 63 of an instruction: the registers of d.
#define PLACES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
    "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_64 \
    PLACES_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
    "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_32 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), \
    "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
    "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
    "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
    "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define REGISTERS_64 \
    REGISTERS_32, \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), \
    "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), \
    "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), \
    "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
    "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

template <int DT>
struct Wgmma;

// rows: d[64 x 64] = a b^T, or + d; a[64 x 16] and b[64 x 16] by rows.
// values: d[64 x N] += a b; a[64 x 16] in registers, b[16 x N] by rows; N is 64 or 128.
#define WGMMA(DTYPE, NAME)                                                                       \
    template <>                                                                                  \
    struct Wgmma<DTYPE> {                                                                        \
        static DEVICE void rows(float (&d)[32], u64 a, u64 b, bool add) {                        \
            asm volatile(                                                                        \
                "{ .reg .pred add; setp.ne.b32 add, %34, 0; "                                    \
                "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" PLACES_32 "}, " \
                "%32, %33, add, 1, 1, 0, 0; }"                                                   \
                : REGISTERS_32                                                                   \
                : "l"(a), "l"(b), "r"(int(add)));                                                \
        }                                                                                        \
        static DEVICE void values(float (&d)[32], const u32 (&a)[4], u64 b) {                    \
            asm volatile(                                                                        \
                "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" PLACES_32 "}, " \
                "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"                                         \
                : REGISTERS_32                                                                   \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                           \
        }                                                                                        \
        static DEVICE void values(float (&d)[64], const u32 (&a)[4], u64 b) {                    \
            asm volatile(                                                                        \
                "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {" PLACES_64      \
                "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                                      \
                : REGISTERS_64                                                                   \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                           \
        }                                                                                        \
    };

WGMMA(BF16, "bf16")
WGMMA(F16, "f16")
