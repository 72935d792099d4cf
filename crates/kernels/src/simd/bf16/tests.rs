use super::*;
use crate::{scratch::Aligned, simd::Level};
use half::bf16;
use pulp::WithSimd;

/// Numbers that bf16 holds.
fn numbers(len: usize, step: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * step % 97) as f32 - 48.0) / 64.0).collect()
}

fn units() -> impl Iterator<Item = (Level, Bf16Products)> {
    let of = |level| Bf16Unit::available(level).into_iter().filter_map(move |unit| Bf16Products::new(unit, level));
    Level::available().into_iter().flat_map(move |level| of(level).map(move |unit| (level, unit)))
}

struct Multiply<'a>(&'a Multiplier, Size, Left<'a>, Right<'a>, Output<'a>);

impl WithSimd for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        self.0.multiply(simd, self.1, self.2, self.3, self.4);
    }
}

/// Tiles are used where the system says that the processor has them.
#[test]
#[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
fn tiles_are_found() {
    let Ok(processor) = std::fs::read_to_string("/proc/cpuinfo") else { return };
    let told = |name: &str| processor.split_whitespace().any(|flag| flag == name);
    // An old kernel does not know the names.
    assert!(amx::has_tiles() || !(told("amx_tile") && told("amx_bf16")));
}

/// Rows, columns and depths on both sides of a tile, stored and added: exact, since the sums of such numbers are.
#[test]
fn every_unit_multiplies() {
    for [rows, cols, depth] in [[1, 16, 1], [15, 16, 32], [16, 48, 33], [33, 64, 64], [50, 80, 127], [128, 32, 200]] {
        let (a, b) = (numbers(rows * depth, 31), numbers(depth * cols, 57));
        let expected = |i: usize, j: usize| (0..depth).map(|d| a[i * depth + d] * b[d * cols + j]).sum::<f32>();
        for (level, products) in units() {
            let tiles = products.enter();
            let (padded, pairs) = (rows.next_multiple_of(ROWS), pairs(depth));
            let (left_stride, right_stride, stride) = (pairs + 16, cols + 16, cols + 32);
            let mut left = vec![u32::MAX; padded * left_stride];
            let mut right = vec![u32::MAX; pairs * right_stride];
            for (row, out) in a.chunks_exact(depth).zip(left.chunks_exact_mut(left_stride)) {
                tiles.round(row, &mut out[..pairs]);
            }
            let zeros = vec![0.0; cols];
            for (pair, out) in right.chunks_exact_mut(right_stride).enumerate() {
                let row = |d: usize| if d < depth { &b[d * cols..][..cols] } else { &zeros[..] };
                tiles.weave([row(2 * pair), row(2 * pair + 1)], &mut out[..cols]);
            }
            let mut out = Aligned::new(padded * stride);
            out.fill(f32::NAN);
            for add in [false, true] {
                let size = Size { rows, cols, pairs };
                let (left, right) =
                    (Left { data: &left, stride: left_stride }, Right { data: &right, stride: right_stride });
                let into = Output { data: &mut out, stride, add };
                level.dispatch(Multiply(&tiles, size, left, right, into));
            }
            for (i, row) in out.chunks_exact(stride).enumerate().take(rows) {
                for (j, &got) in row[..cols].iter().enumerate() {
                    let expected = 2.0 * expected(i, j);
                    assert!(
                        (got - expected).abs() <= 1e-4,
                        "{products:?} {rows}x{cols}x{depth} ({i}, {j}): {got}, not {expected}"
                    );
                }
                assert!(row[cols..].iter().all(|x| x.is_nan()), "nothing is written beside the product");
            }
        }
    }
}

#[test]
fn every_unit_rounds_to_the_nearest() {
    let spread = (0..1 << 12).map(|n| f32::from_bits(0x0080_0000 + n * 0x0007_f3a1));
    let mut x: Vec<f32> = spread.filter(|x| x.is_finite()).collect();
    x.extend([0.0, -0.0, 1.0, -1.5, 1.003_906_2, 1.011_718_8, f32::MAX, -f32::MAX, f32::INFINITY, f32::NEG_INFINITY]);
    let expected = |x: f32| u32::from(bf16::from_f32(x).to_bits());
    for (_, products) in units() {
        let tiles = products.enter();
        for len in [1, 2, 15, 16, 17, 31, 33, x.len()] {
            let (row, other) = (&x[x.len() - len..], &x[..len]);
            let mut out = vec![u32::MAX; len.div_ceil(2) + 3];
            tiles.round(row, &mut out);
            for (n, &got) in out.iter().enumerate() {
                let half = |n: usize| row.get(n).map_or(0, |&x| expected(x));
                assert_eq!(got, half(2 * n) | half(2 * n + 1) << 16, "{products:?} at {n} of {len}");
            }
            let mut out = vec![u32::MAX; len + 3];
            tiles.weave([row, other], &mut out);
            for (n, &got) in out.iter().enumerate() {
                let wanted = if n < len { expected(row[n]) | expected(other[n]) << 16 } else { 0 };
                assert_eq!(got, wanted, "{products:?} at {n} of {len}");
            }
        }
        let mut out = [0; 1];
        tiles.round(&[f32::NAN, 1.0], &mut out);
        assert!(bf16::from_bits(out[0] as u16).is_nan());
    }
}

#[test]
fn every_unit_transposes() {
    let x: Vec<u32> = (0..48 * 64).collect();
    for (_, products) in units() {
        let tiles = products.enter();
        let mut out = vec![u32::MAX; 32 * 80];
        tiles.transpose([48, 32], (&x, 64), (&mut out, 80));
        for (col, row) in out.chunks_exact(80).enumerate() {
            for (n, &got) in row.iter().enumerate() {
                let wanted = if n < 48 { (n * 64 + col) as u32 } else { u32::MAX };
                assert_eq!(got, wanted, "{products:?} ({col}, {n})");
            }
        }
    }
}
