//! The series of all hops: iterations, error bound, time and scratch of `infsa-resolvent`, untied (Neumann) and tied
//! (conjugate gradients), on Gaussian-like tokens and on tokens with a common mean, which need the most hops.
//!
//! `cargo bench --bench resolvent -- [TOKENS] [GAMMA]`; default 4096 and 0.95 at tol 1e-6,
//! `[1, 1, TOKENS, 64]`.

use std::time::Instant;

use resolvent_kernels::{
    ExtraGradients, Extras, Gradients, Inputs, Mask, Mechanism, Operator, Scratch, Shape, Strategy,
    mechanism::InfsaResolvent,
};

fn main() {
    let numbers: Vec<f64> = std::env::args().skip(1).filter_map(|x| x.parse().ok()).collect();
    let tokens = numbers.first().map_or(4096, |&n| n as usize);
    let gamma = numbers.get(1).copied().unwrap_or(0.95);
    let shape = Shape::square(1, 1, tokens, 64);
    println!("{shape:?}, gamma {gamma}, tol 1e-6, {} threads", rayon::current_num_threads());
    for (tied, mean) in [(false, 0.0), (true, 0.0), (false, 0.4), (true, 0.4)] {
        let mechanism = Mechanism::from(InfsaResolvent::default().with_gamma(gamma).with_tied(tied));
        let op = Operator::new(&mechanism, shape, false, Strategy::Fused).expect("an operator");
        let [q, k, v, dout] = [1, 2, 3, 4].map(|seed| noise(seed, shape.q_len()));
        let shifted = |x: &[f32]| x.iter().map(|x| x + mean).collect::<Vec<_>>();
        let (q, k) = (shifted(&q), shifted(&k));
        let inputs = Inputs { q: &q, k: (!tied).then_some(&k[..]), v: &v, extras: Extras::default() };
        let (mut out, mut stats) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats]);
        let [mut dq, mut dk, mut dv] = [0.0; 3].map(|x| vec![x; shape.q_len()]);
        let mut scratch = Scratch::new(op.plan().scratch_forward.max(op.plan().scratch_backward));
        let (mut forward, mut backward) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..3 {
            let start = Instant::now();
            op.forward(&inputs, &Mask::NONE, &mut out, &mut stats, &mut scratch).expect("forward");
            forward = forward.min(start.elapsed().as_secs_f64());
            let dk = (!tied).then_some(&mut dk[..]);
            let mut gradients = Gradients { dq: &mut dq, dk, dv: &mut dv, extras: ExtraGradients::default() };
            let start = Instant::now();
            op.backward(&inputs, &Mask::NONE, &out, &stats, &dout, &mut gradients, &mut scratch).expect("backward");
            backward = backward.min(start.elapsed().as_secs_f64());
        }
        let solved = op.convergence(&stats).expect("a solver")[0];
        println!(
            "tied {tied:5} mean {mean}: {:3} iterations, bound {:.1e}, forward {:.3} s, backward {:.3} s, scratch {:.1} MiB \
             (the matrix would be {:.0} MiB)",
            solved.iterations,
            solved.bound,
            forward,
            backward,
            scratch.len() as f64 * 4.0 / f64::from(1 << 20),
            (tokens * tokens) as f64 * 4.0 / f64::from(1 << 20),
        );
    }
}

/// Sums of uniform numbers: nearly normal, variance one.
fn noise(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9);
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..len).map(|_| (0..12).map(|_| uniform()).sum()).collect()
}
