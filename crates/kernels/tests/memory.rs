//! Memory: a call whose buffers are warm allocates nothing, and what a plan asks for grows with the tokens, not with
//! their pairs. One test of its own binary, as the allocator counts for the whole process.

mod support;

use peak_alloc::PeakAlloc;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use resolvent_kernels::{
    Element, ExtraGradients, Extras, Gradients, Inputs, Mask, Mechanism, Operator, Plan, Precision, Scratch, Shape,
    Strategy,
    mechanism::{Landmarks, PoolWindows},
    simd::Bf16Unit,
};
use support::random::mechanisms;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// The most bytes that `f` held at any time beyond what was held before.
fn extra(f: impl FnOnce()) -> usize {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    f();
    MEMORY.peak_usage() - before
}

/// Estimators and samplers, whose calls allocate different things. Without a limit on their size there are as many causal
/// clusters as are asked for; with one, those that fill up are followed by others.
const CLUSTERED: &[&str] = &[
    r#"{"mechanism": "ssa"}"#,
    r#"{"mechanism": "ssa", "sampler": "row"}"#,
    r#"{"mechanism": "ssa", "estimator": "centroid", "balance": null}"#,
    r#"{"mechanism": "ssa", "estimator": "centroid", "cluster_on": "keys", "balance": null, "jl_dim": 16}"#,
];

/// Sums of hops, which keep every one of them, and of all hops.
const HOPS: &[&str] = &[
    r#"{"mechanism": "composed", "series": {"kind": "hops", "count": 2}}"#,
    r#"{"mechanism": "composed", "series": {"kind": "resolvent", "gamma": 0.8}}"#,
    r#"{"mechanism": "composed", "normalisation": "symmetric", "series": {"kind": "resolvent", "gamma": 0.8}}"#,
    r#"{"mechanism": "composed", "structure": {"kind": "clustered", "clusters": 16}, "series": {"kind": "resolvent", "gamma": 0.8}}"#,
    r#"{"mechanism": "composed", "structure": {"kind": "clustered", "clusters": 16, "estimator": "centroid"}, "series": {"kind": "hops", "count": 3}}"#,
    r#"{"mechanism": "composed", "structure": {"kind": "clustered", "clusters": 16}, "series": {"kind": "hops", "count": 2}}"#,
    r#"{"mechanism": "soft-pp", "series": {"kind": "hops", "count": 4}}"#,
    r#"{"mechanism": "routed", "series": {"kind": "hops", "count": 2}}"#,
    r#"{"mechanism": "composed", "structure": {"kind": "features"}, "series": {"kind": "resolvent", "gamma": 0.8}}"#,
    r#"{"mechanism": "composed", "series": {"kind": "hops", "count": 24}}"#,
    r#"{"mechanism": "composed", "structure": {"kind": "clustered", "estimator": "centroid"}, "series": {"kind": "hops", "count": 24}}"#,
];

/// Compositions with products of bf16.
const ROUNDED: &[&str] = &[r#"{"mechanism": "sigmoid"}"#, r#"{"mechanism": "softmax", "bias": {"kind": "alibi"}}"#];

/// Maps of features, over all tokens and over those so far.
const FEATURES: &[&str] =
    &[r#"{"mechanism": "linear"}"#, r#"{"mechanism": "performer"}"#, r#"{"mechanism": "performer", "causal": true}"#];

/// Allocations of a later forward and backward pass over the same buffers, in bytes: 0 if one of several has none.
fn steady_state<T: Element>(mechanism: &Mechanism, shape: Shape) -> usize {
    let mechanism = &with_few_landmarks(mechanism, shape.seq_q);
    let op = Operator::new(mechanism, shape, false, Strategy::Fused).unwrap();
    let entries = |len: usize| (0..len).map(|i| T::narrow(((i * 37 % 101) as f32).sin())).collect::<Vec<T>>();
    let (q, k, v) = (entries(shape.q_len()), entries(shape.k_len()), entries(shape.v_len()));
    let (dout, mut out) = (entries(op.out_len()), entries(op.out_len()));
    let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), v.clone());
    let keep: Vec<bool> = (0..shape.batch * shape.seq_q).map(|n| n % 5 != 1).collect();
    let mask = Mask::padding(&keep);
    let (mut stats, mut scratch) = (vec![0.0; op.plan().stats], Scratch::default());
    let required = mechanism.parameters().into_iter().filter(|parameter| parameter.required());
    let parameters = Vec::from_iter(required.map(|p| (p, mechanism.parameter_default(p, &shape))));
    let extras = parameters.iter().fold(Extras::default(), |extras, (p, values)| extras.with(*p, values));
    let inputs = Inputs { q: &q, k: (!mechanism.tied).then_some(&k), v: &v, extras };
    let mut call = || {
        op.forward(&inputs, &mask, &mut out, &mut stats, &mut scratch).unwrap();
        let dk = (!mechanism.tied).then_some(&mut dk[..]);
        let mut gradients = Gradients { dq: &mut dq, dk, dv: &mut dv, extras: ExtraGradients::default() };
        op.backward(&inputs, &mask, &out, &stats, &dout, &mut gradients, &mut scratch).unwrap();
    };
    call();
    // Now and then the pool's own queues grow: what the kernels allocate, they allocate every time.
    (0..8).map(|_| extra(&mut call)).find(|&bytes| bytes == 0).unwrap_or_else(|| extra(&mut call))
}

/// The most that a warm forward and a warm backward pass hold beside scratch, over what is planned for; with a mask `keep`, of
/// queries and keys alike.
fn held_over_planned(mechanism: &Mechanism, causal: bool, shape: Shape, keep: Option<&[bool]>) -> [f64; 2] {
    held_by(&Operator::new(mechanism, shape, causal, Strategy::Fused).unwrap(), keep)
}

/// The same of an operator.
fn held_by(op: &Operator, keep: Option<&[bool]>) -> [f64; 2] {
    let (mechanism, shape) = (op.mechanism(), *op.shape());
    let mut random = ChaCha8Rng::seed_from_u64(3);
    let mut entries = |len: usize| Vec::from_iter((0..len).map(|_| random.random_range(-1.0..1.0_f32)));
    let (q, k, v) = (entries(shape.q_len()), entries(shape.k_len()), entries(shape.v_len()));
    let (mut out, mut stats, mut scratch) = (vec![0.0; op.out_len()], vec![0.0; op.plan().stats], Scratch::default());
    let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), v.clone());
    let required = mechanism.parameters().into_iter().filter(|parameter| parameter.required());
    let parameters = Vec::from_iter(required.map(|p| (p, mechanism.parameter_default(p, &shape))));
    let extras = parameters.iter().fold(Extras::default(), |extras, (p, values)| extras.with(*p, values));
    let untied = !mechanism.tied;
    let (inputs, mask) =
        (Inputs { q: &q, k: untied.then_some(&k), v: &v, extras }, keep.map_or(Mask::default(), Mask::padding));
    let plan = *op.plan();
    scratch.take(plan.scratch_forward.max(plan.scratch_backward));
    let forward = extra(|| op.forward(&inputs, &mask, &mut out, &mut stats, &mut scratch).unwrap());
    let backward = extra(|| {
        let dk = untied.then_some(&mut dk[..]);
        let mut gradients = Gradients { dq: &mut dq, dk, dv: &mut dv, extras: ExtraGradients::default() };
        op.backward(&inputs, &mask, &out, &stats, &v, &mut gradients, &mut scratch).unwrap();
    });
    [forward as f64 / plan.allocated_forward as f64, backward as f64 / plan.allocated_backward as f64]
}

/// The same mechanism with windows so wide that there are sixteen of them, however many tokens.
fn with_few_landmarks(mechanism: &Mechanism, tokens: usize) -> Mechanism {
    let ratio = tokens / 16;
    mechanism.clone().with_landmarks(|landmarks| match landmarks {
        Landmarks::Pool(PoolWindows::Ratio(_)) => Landmarks::Pool(PoolWindows::Ratio(ratio)),
        Landmarks::Conv { .. } => Landmarks::Conv { ratio },
        Landmarks::Stride { .. } => Landmarks::Stride { ratio },
        other => other,
    })
}

#[test]
fn warm_calls_allocate_nothing_and_plans_are_linear() {
    // Within the pool: entering it from outside is what may allocate.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let shape = Shape::square(2, 2, 600, 16);
    // What clusters need depends on the clusters that the call finds: it is allocated in the call, as planned.
    let clustered = |m: &Mechanism| m.id() == "ssa";
    // Presets that the engine of compositions carries out allocate too, no more than is planned for the case that all rows are copied.
    let by_engine = |m: &Mechanism| m.landmark_kind() == Some(Landmarks::All) || m.id() == "laplacian-exact";
    let features = FEATURES.iter().map(|json| Mechanism::from_json(json).unwrap());
    let lent = mechanisms().into_iter().filter(|m| !clustered(m) && !by_engine(m));
    for mechanism in lent.chain(features.clone()) {
        // The threads' own queues grow once.
        pool.install(|| steady_state::<f32>(&mechanism, shape));
        assert_eq!(pool.install(|| steady_state::<f32>(&mechanism, shape)), 0, "{mechanism:?}");
        assert_eq!(pool.install(|| steady_state::<half::bf16>(&mechanism, shape)), 0, "{mechanism:?}, bf16");
    }
    let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for (json, causal) in CLUSTERED.iter().flat_map(|json| [(json, false), (json, true)]) {
        let mechanism = &Mechanism::from_json(json).unwrap();
        let held = || held_over_planned(mechanism, causal, Shape::square(2, 2, 2048, 64), None);
        let one = alone.install(held);
        assert!(one.iter().all(|share| (0.8..1.1).contains(share)), "{json}, causal {causal}: {one:?} of the plan");
        // Where one of two threads comes late, less is planned at once.
        let two = pool.install(held);
        assert!(two.iter().all(|share| (0.3..1.1).contains(share)), "{json}, causal {causal}: {two:?} of the plan");
    }
    let keep: Vec<bool> = (0..2 * 2048).map(|n| n % 5 != 1).collect();
    for mechanism in &mechanisms().into_iter().filter(by_engine).collect::<Vec<_>>() {
        for (shape, keep, least) in [
            (Shape::square(2, 2, 2048, 64), Some(&keep[..]), 0.5),
            (Shape::square(2, 2, 2048, 64), None, 0.0),
            (Shape::square(1, 1, 2048, 24), None, 0.5),
        ] {
            for pool in [&alone, &pool] {
                let held = pool.install(|| held_over_planned(mechanism, false, shape, keep));
                assert!(held.iter().all(|share| (least..1.1).contains(share)), "{mechanism:?}: {held:?} of the plan");
            }
        }
    }
    for json in HOPS {
        let mechanism = Mechanism::from_json(json).unwrap();
        for (shape, keep, pool) in [
            (Shape::square(2, 2, 1024, 64), Some(&keep[..2 * 1024]), &alone),
            (Shape::square(1, 1, 2048, 24), None, &pool),
        ] {
            let held = pool.install(|| held_over_planned(&mechanism, false, shape, keep));
            assert!(held.iter().all(|share| (0.3..1.2).contains(share)), "{json}, {shape:?}: {held:?} of the plan");
        }
    }
    for json in ROUNDED {
        let mechanism = Mechanism::from_json(json).unwrap();
        for (shape, keep) in [(Shape::square(2, 2, 2048, 64), Some(&keep[..])), (Shape::square(1, 1, 2048, 24), None)] {
            for precision in [Precision::Bf16, Precision::Bf16x3] {
                let op = Operator::new(&mechanism, shape, false, Strategy::Fused).unwrap().with_precision(precision);
                let op = op.with_bf16_unit(Bf16Unit::Widened).unwrap();
                assert_eq!(op.plan().arithmetic.runs, precision, "{json}");
                let held = alone.install(|| held_by(&op, keep));
                assert!(
                    held.iter().all(|share| (0.5..1.1).contains(share)),
                    "{json}, {precision:?}: {held:?} of the plan"
                );
            }
        }
    }
    for mechanism in mechanisms().into_iter().chain(features) {
        let plan = |n: usize| {
            let mechanism = with_few_landmarks(&mechanism, n);
            resolvent_kernels::plan(&mechanism, &Shape::square(1, 1, n, 16), false, Strategy::Fused)
        };
        let held = |plan: Plan| plan.scratch_forward.max(plan.scratch_backward) + plan.stats;
        let [short, long] = [1 << 14, 1 << 18].map(|n| held(plan(n).unwrap()));
        assert!(long <= 17 * short, "{mechanism:?} holds {short} and {long} f32");
    }
}
