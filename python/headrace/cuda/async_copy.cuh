// Copies from global to shared memory that a thread does not wait for.
#pragma once

#include "kv_common.cuh"

DEVICE u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}
// Copies of `size` bytes, zero-filled where `live` is false (and nothing is read).
DEVICE void copy_16(u32 target, const void* source, bool live) {
    int bytes = live ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target),
                 "l"(source), "r"(bytes));
}
template <int SIZE>
DEVICE void copy_small(u32 target, const void* source, bool live) {
    int bytes = live ? SIZE : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source),
                 "n"(SIZE), "r"(bytes));
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
