//! A score of your own: how two tokens relate, in thirty lines, on every structure and with gradients.
//!
//! `cargo run --release --example custom_score`

use resolvent_kernels::{
    Extras, Gradients, Inputs, Mask, Mechanism, Operator, Result, Scratch, Shape, Strategy,
    mechanism::{Nystrom, Score, Ssa, Structure},
    score::{PairScore, Simd, Slopes, Term},
};

/// `1 / (1 + |q - k|^2 / width)`: the rational quadratic kernel, of all the tokens near by and a few far away.
struct RationalQuadratic {
    width: f32,
}

impl PairScore for RationalQuadratic {
    const TERM: Term = Term::SquaredDifference;
    const LOG: bool = false;
    const NON_NEGATIVE: bool = true;

    #[inline(always)]
    fn value<S: Simd>(&self, simd: S, square: S::f32s) -> S::f32s {
        let one = simd.splat_f32s(1.0);
        simd.div_f32s(one, simd.mul_add_f32s(square, simd.splat_f32s(1.0 / self.width), one))
    }

    #[inline(always)]
    fn slopes<S: Simd>(&self, simd: S, square: S::f32s) -> Slopes<S::f32s> {
        // g = 1 / (1 + x / w), so that dg/dx = -g^2 / w.
        let g = self.value(simd, square);
        let slope = simd.mul_f32s(simd.mul_f32s(g, g), simd.splat_f32s(-1.0 / self.width));
        Slopes { term: slope, parameters: [simd.splat_f32s(0.0); 2] }
    }
}

fn main() -> Result<()> {
    let shape = Shape::square(1, 2, 300, 16);
    let numbers = |step: usize| (0..shape.q_len()).map(|n| ((n * step) as f32 * 0.37).sin()).collect::<Vec<_>>();
    let (q, k, v) = (numbers(3), numbers(5), numbers(7));
    let inputs = Inputs { q: &q, k: Some(&k), v: &v, extras: Extras::default() };
    let clusters = Ssa::default().with_clusters(Some(12));
    for structure in [Structure::default(), clusters.into()] {
        let score = Score::custom("rational-quadratic", RationalQuadratic { width: 4.0 });
        let composed = Mechanism::new(score).structure(structure);
        println!("{composed}");
        let op = Operator::new(&composed, shape, false, Strategy::Fused)?;
        let (mut out, mut stats) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats]);
        let mut scratch = Scratch::default();
        op.forward(&inputs, &Mask::NONE, &mut out, &mut stats, &mut scratch)?;
        let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
        let extras = Default::default();
        let mut gradients = Gradients { dq: &mut dq, dk: Some(&mut dk), dv: &mut dv, extras };
        op.backward(&inputs, &Mask::NONE, &out, &stats, &out, &mut gradients, &mut scratch)?;
        let size = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>().sqrt();
        println!("  |out| {:.3}, |dq| {:.5}, |dk| {:.5}, |dv| {:.3}", size(&out), size(&dq), size(&dk), size(&dv));
    }
    // Landmarks stand for tokens where the affinities are positive definite: say so in the contract to have them.
    let score = Score::custom("rational-quadratic", RationalQuadratic { width: 4.0 });
    let refused = Operator::new(&Mechanism::new(score).structure(Nystrom::default()), shape, false, Strategy::Auto);
    println!("{}", refused.unwrap_err());
    Ok(())
}
