//! The product by `tdpbf16ps` on the tiles of AMX. The compiler has no stable intrinsics for them, so that they are used by inline
//! assembly; each statement loads all that it needs and stores all that it makes. Between them only the configuration stays.

use std::{
    arch::{asm, x86_64::__cpuid_count},
    ptr,
    sync::OnceLock,
};

use super::{Left, Output, PAIRS, ROWS, Right, Size, TERMS};

/// Rows and bytes per row of the eight tiles, as `ldtilecfg` reads them.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All tiles of 16 rows of 64 bytes: operands are padded to that.
static WHOLE: Configuration = Configuration {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Whether the processor has tiles and products of bf16, and the kernel lets this process have them: asked once.
pub(super) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_tiles() && permitted())
}

pub(super) fn has_tiles() -> bool {
    const BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
    #[allow(unused_unsafe)] // safe from Rust 1.94 on
    // SAFETY: every x86-64 has this instruction; leaf 7 is there wherever AVX-512 is, which was asked for before.
    let features = unsafe { __cpuid_count(7, 0) };
    features.edx & BF16_AND_TILES == BF16_AND_TILES
}

/// Asks for the state of the tiles (`arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`), which threads enlarge when they first use it.
fn permitted() -> bool {
    const ARCH_PRCTL: usize = 158;
    const REQUEST_PERMISSION: usize = 0x1023;
    const TILE_DATA: usize = 18;
    let result: isize;
    // SAFETY: the call reads no memory of ours, and the registers that it changes are named.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") REQUEST_PERMISSION,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// Configures the tiles of this thread. Only where they are [`available`].
pub(super) fn configure() {
    debug_assert!(available());
    // SAFETY: the tiles are available and the configuration is valid; nothing else in the process keeps anything in tiles across calls.
    unsafe {
        asm!(
            "ldtilecfg [{}]", in(reg) &raw const WHOLE,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly),
        );
    }
}

/// Gives the tiles of this thread back, so that switches of threads need not save them.
pub(super) fn release() {
    // SAFETY: only where `configure` was called before.
    unsafe {
        asm!(
            "tilerelease",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, nomem),
        );
    }
}

/// The sum of products of whole tiles, two by two of them where there are as many; at most [`TERMS`] products.
///
/// # Safety
/// The tiles are configured; whole tiles of rows, columns and pairs lie in the slices.
pub(super) unsafe fn multiply(size: Size, terms: &[(Left<'_>, Right<'_>)], into: Output<'_>) {
    let (rows, steps) = (size.rows.next_multiple_of(ROWS), size.pairs / PAIRS);
    let [(left, right), ..] = terms else { return };
    let strides = [left.stride, right.stride, into.stride];
    debug_assert!(terms.iter().all(|(l, r)| [l.stride, r.stride] == strides[..2]));
    let mut row = 0;
    while row < rows {
        let mut col = 0;
        let tall = row + 2 * ROWS <= rows;
        while col < size.cols {
            let wide = col + 2 * ROWS <= size.cols;
            let mut from = [Operands { a: ptr::null(), a1: ptr::null(), b: ptr::null() }; TERMS + 1];
            for (from, (left, right)) in from.iter_mut().zip(&terms[..terms.len().min(TERMS)]) {
                let a = left.data.as_ptr().wrapping_add(row * left.stride);
                *from =
                    Operands { a, a1: a.wrapping_add(ROWS * left.stride), b: right.data.as_ptr().wrapping_add(col) };
            }
            let c = into.data.as_mut_ptr().wrapping_add(row * into.stride + col);
            // SAFETY: by this function's contract, for the tiles that are left.
            unsafe {
                match (tall, wide) {
                    (true, true) => two_by_two(steps, &from, c, strides, into.add),
                    (true, false) => two_by_one(steps, &from, c, strides, into.add),
                    (false, true) => one_by_two(steps, &from, c, strides, into.add),
                    (false, false) => one_by_one(steps, &from, c, strides, into.add),
                }
            }
            col += if wide { 2 * ROWS } else { ROWS };
        }
        row += if tall { 2 * ROWS } else { ROWS };
    }
}

/// Where a product's tiles begin: those of rows, those of the rows below, and those of columns. Null ends a list of them.
#[derive(Clone, Copy)]
#[repr(C)]
struct Operands {
    a: *const u32,
    a1: *const u32,
    b: *const u32,
}

/// A kernel: what is loaded of the sums, what is done in a step, what is stored.
macro_rules! kernel {
    ($name:ident, $what:literal, [$($load:literal),*], [$($zero:literal),*], [$($step:literal),*], [$($store:literal),*]) => {
        #[doc = $what]
        ///
        /// # Safety
        /// The tiles are configured, and lie in what the pointers may read and write, rows so many elements apart.
        unsafe fn $name(
            steps: usize,
            from: &[Operands; TERMS + 1],
            c: *mut f32,
            strides: [usize; 3],
            add: bool,
        ) {
            let [sa, sb, sc] = strides.map(|stride| 4 * stride);
            // SAFETY: by this function's contract; every register that is changed is named.
            unsafe {
                asm!(
                    "test {n}, {n}",
                    "jz 3f",
                    $($load,)*
                    "jmp 4f",
                    "3:",
                    $($zero,)*
                    "4:",
                    "mov {a}, qword ptr [{from}]",
                    "test {a}, {a}",
                    "jz 5f",
                    "mov {a1}, qword ptr [{from} + 8]",
                    "mov {b}, qword ptr [{from} + 16]",
                    "add {from}, 24",
                    "mov {n}, {steps}",
                    "test {n}, {n}",
                    "jz 4b",
                    "2:",
                    $($step,)*
                    "add {a}, 64",
                    "add {a1}, 64",
                    "add {b}, {deeper}",
                    "dec {n}",
                    "jnz 2b",
                    "jmp 4b",
                    "5:",
                    $($store,)*
                    n = inout(reg) usize::from(add) => _,
                    steps = in(reg) steps,
                    from = inout(reg) from.as_ptr() => _,
                    a = out(reg) _,
                    a1 = out(reg) _,
                    b = out(reg) _,
                    deeper = in(reg) PAIRS * sb,
                    c = in(reg) c,
                    c1 = in(reg) c.wrapping_byte_add(ROWS * sc),
                    sa = in(reg) sa,
                    sb = in(reg) sb,
                    sc = in(reg) sc,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

kernel!(
    two_by_two,
    "Two tiles of rows by two of columns.",
    [
        "tileloadd tmm0, [{c} + {sc}]",
        "tileloadd tmm1, [{c} + {sc} + 64]",
        "tileloadd tmm2, [{c1} + {sc}]",
        "tileloadd tmm3, [{c1} + {sc} + 64]"
    ],
    ["tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3"],
    [
        "tileloadd tmm4, [{a} + {sa}]",
        "tileloadd tmm6, [{b} + {sb}]",
        "tileloadd tmm7, [{b} + {sb} + 64]",
        "tileloadd tmm5, [{a1} + {sa}]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tdpbf16ps tmm1, tmm4, tmm7",
        "tdpbf16ps tmm2, tmm5, tmm6",
        "tdpbf16ps tmm3, tmm5, tmm7"
    ],
    [
        "tilestored [{c} + {sc}], tmm0",
        "tilestored [{c} + {sc} + 64], tmm1",
        "tilestored [{c1} + {sc}], tmm2",
        "tilestored [{c1} + {sc} + 64], tmm3"
    ]
);
kernel!(
    two_by_one,
    "Two tiles of rows by one of columns.",
    ["tileloadd tmm0, [{c} + {sc}]", "tileloadd tmm2, [{c1} + {sc}]"],
    ["tilezero tmm0", "tilezero tmm2"],
    [
        "tileloadd tmm4, [{a} + {sa}]",
        "tileloadd tmm6, [{b} + {sb}]",
        "tileloadd tmm5, [{a1} + {sa}]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tdpbf16ps tmm2, tmm5, tmm6"
    ],
    ["tilestored [{c} + {sc}], tmm0", "tilestored [{c1} + {sc}], tmm2"]
);
kernel!(
    one_by_two,
    "One tile of rows by two of columns.",
    ["tileloadd tmm0, [{c} + {sc}]", "tileloadd tmm1, [{c} + {sc} + 64]"],
    ["tilezero tmm0", "tilezero tmm1", "/* {c1} */"],
    [
        "tileloadd tmm4, [{a} + {sa}]",
        "tileloadd tmm6, [{b} + {sb}]",
        "tileloadd tmm7, [{b} + {sb} + 64]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tdpbf16ps tmm1, tmm4, tmm7"
    ],
    ["tilestored [{c} + {sc}], tmm0", "tilestored [{c} + {sc} + 64], tmm1"]
);
kernel!(
    one_by_one,
    "One tile of rows by one of columns.",
    ["tileloadd tmm0, [{c} + {sc}]"],
    ["tilezero tmm0", "/* {c1} */"],
    ["tileloadd tmm4, [{a} + {sa}]", "tileloadd tmm6, [{b} + {sb}]", "tdpbf16ps tmm0, tmm4, tmm6"],
    ["tilestored [{c} + {sc}], tmm0"]
);
