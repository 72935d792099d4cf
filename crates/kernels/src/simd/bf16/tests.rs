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
                let (left, right) = (Left::new(&left, left_stride), Right::new(&right, right_stride));
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

/// Both parts of an operand add up to 16 bits of it, wherever they are written; three products of them to as many of the product.
#[test]
fn two_parts_keep_sixteen_bits() {
    let (rows, cols, depth) = (33, 48, 70);
    let wave = |len: usize, step: f32| (0..len).map(|i| (i as f32 * step).sin() * 3.0).collect::<Vec<f32>>();
    let (a, b) = (wave(rows * depth, 0.37), wave(cols * depth, 0.83));
    for (level, products) in units() {
        let tiles = products.of_parts(2).enter();
        let (all, pairs) = (rows.next_multiple_of(ROWS), pairs(depth));
        let mut by_row = vec![u32::MAX; all * 2 * pairs];
        for (row, out) in a.chunks_exact(depth).zip(by_row.chunks_exact_mut(2 * pairs)) {
            tiles.round(row, out);
            for (n, &x) in row.iter().enumerate() {
                let half = |part: usize| f32::from_bits(out[part * pairs + n / 2] >> (16 * (n % 2)) << 16);
                let read = half(0) + half(1);
                assert_eq!(read, products.of_parts(2).read(x), "{products:?}");
                assert!((read - x).abs() <= x.abs() / 65_536.0, "{products:?}: {read}, not {x}");
            }
        }
        let mut by_tile = vec![u32::MAX; all * 2 * pairs];
        let left = tiles.round_tile((&a, depth), [rows, depth], (&mut by_tile, 2 * pairs));
        for row in 0..rows {
            assert_eq!(left.data[row * left.stride..][..2 * pairs], by_row[row * 2 * pairs..][..2 * pairs]);
        }
        // The right operand as rows of a tile, woven in place, and as woven rows.
        let mut tile = Aligned::new(2 * pairs * cols);
        for (d, row) in tile.chunks_exact_mut(cols).enumerate().take(depth) {
            row.iter_mut().enumerate().for_each(|(c, x)| *x = b[c * depth + d]);
        }
        let mut woven = vec![u32::MAX; pairs * 2 * cols];
        let zeros = vec![0.0; cols];
        for (pair, out) in woven.chunks_exact_mut(2 * cols).enumerate() {
            let row = |d: usize| if d < depth { &tile[d * cols..][..cols] } else { &zeros[..] };
            tiles.weave([row(2 * pair), row(2 * pair + 1)], out);
        }
        let right = tiles.weave_in_place((&mut tile, cols), [depth, cols]);
        for pair in 0..pairs {
            for part in 0..2 {
                let [placed, other] = [(right.data, right.stride, right.second), (&woven[..], 2 * cols, cols)]
                    .map(|(data, stride, second)| data[pair * stride + part * second..][..cols].to_vec());
                assert_eq!(placed, other, "{products:?}: pair {pair} of part {part}");
            }
        }
        let mut out = Aligned::new(all * cols);
        for add in [false, true] {
            let into = Output { data: &mut out, stride: cols, add };
            level.dispatch(Multiply(&tiles, Size { rows, cols, pairs }, left, right, into));
        }
        for (i, out) in out.chunks_exact(cols).enumerate().take(rows) {
            for (j, &got) in out.iter().enumerate() {
                let [x, y] = [&a[i * depth..][..depth], &b[j * depth..][..depth]];
                let terms = x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y));
                let (exact, size) = terms.fold((0.0, 0.0), |(sum, size), x| (sum + 2.0 * x, size + 2.0 * x.abs()));
                let error = (f64::from(got) - exact).abs();
                assert!(error <= size / 65_536.0, "{products:?} at ({i}, {j}): {error:e} of terms of {size}");
            }
        }
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
