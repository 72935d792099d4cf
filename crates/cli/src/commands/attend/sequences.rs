//! Sequences that lie end to end in the file: each attends to itself alone.

use std::path::Path;

use resolvent_kernels::{
    self as kernels, ExtraGradients, Heads, Mechanism, Operator, Scratch, Sequences, Shape, Strategy, Strided,
    StridedGradients, VarlenInputs, VarlenOperator,
};
use serde_json::json;

use super::{
    Attend, Done,
    call::{Layout, Tensors},
    check_memory,
    compute::{self, Names},
    print_plan, report, shape_json, warn_of_precision, write,
};
use crate::{
    Error,
    args::Global,
    destination::Destination,
    error::Result,
    tensors::{Named, Stored, TensorFile},
};

/// Whether `name` says where sequences begin and end.
pub fn is_bounds(name: &str) -> bool {
    ["cu_seqlens", "cu_seqlens_k"].contains(&name)
}

/// The sequences that the file speaks of.
///
/// # Errors
/// Bounds that are no cumulative lengths or not those of the tokens, or bounds of keys alone.
pub fn read(file: &TensorFile, layout: &Layout) -> Result<Option<Sequences>> {
    let bounds = |name| {
        let read = |tensor: Stored<'_>| {
            let of = |&x: &i64| {
                usize::try_from(x).map_err(|_| tensor.error(format!("holds {x}; lengths are no less than 0")))
            };
            tensor.integers()?.iter().map(of).collect::<Result<Vec<usize>>>()
        };
        file.get(name).map(read).transpose()
    };
    let (queries, keys) = (bounds("cu_seqlens")?, bounds("cu_seqlens_k")?);
    let made = match (&queries, &keys) {
        (None, None) => return Ok(None),
        (None, Some(_)) => {
            file.require("cu_seqlens", "it says where the queries of cu_seqlens_k begin and end")?;
            return Ok(None);
        }
        (Some(queries), None) => Sequences::new(queries),
        (Some(queries), Some(keys)) => Sequences::cross(queries, keys),
    };
    let sequences = made.map_err(|error| match error {
        // The kernels name their arguments; the file has tensors.
        kernels::Error::OutOfRange { field, got, expected } => {
            let name = if field == "keys" { "cu_seqlens_k" } else { "cu_seqlens" };
            Error::file(file.path(), format!("tensor `{name}` is {got}, must be {expected}"))
        }
        other => Error::kernels(file.path())(other),
    })?;
    let s = &layout.shape;
    let ends = [sequences.tokens(), sequences.keys()];
    if s.batch == 1 && ends == [s.seq_q, s.seq_kv] {
        return Ok(Some(sequences));
    }
    let problem = format!(
        "cu_seqlens ends at {} queries and {} keys, but q and v are of {} batch entries with {} and {}: sequences end to end are one \
         entry that holds all tokens",
        ends[0], ends[1], s.batch, s.seq_q, s.seq_kv
    );
    Err(Error::file(file.path(), problem))
}

/// Runs the command on `sequences`.
pub fn run(
    args: &Attend,
    global: &Global,
    mechanism: &Mechanism,
    file: &TensorFile,
    (layout, sequences): (&Layout, &Sequences),
    destination: Option<(&Path, Destination)>,
) -> Result<()> {
    if args.weights || args.clusters || args.certificate {
        let problem = "holds sequences end to end (cu_seqlens); --weights, --clusters and --certificate are of one: leave them out";
        return Err(Error::file(&args.input, problem));
    }
    let s = &layout.shape;
    let kv_heads = layout.heads_taken(args.reference);
    let heads = Heads { heads: s.heads, kv_heads, head_dim: s.head_dim, value_dim: s.value_dim };
    let strategy = if args.reference { Strategy::Reference } else { Strategy::Auto };
    let operator = VarlenOperator::new(mechanism, heads, sequences, args.causal, strategy);
    let operator = operator.map_err(Error::kernels(&args.input))?.with_precision(args.precision);
    let mut shape = shape_json(s);
    shape["sequences"] = json!(sequences.len());
    let Some((output, destination)) = destination else {
        return print_plan(mechanism, &shape, operator.plan(), global);
    };
    // All tokens as one sequence: what tensors are called, and how large they are.
    let whole = Operator::new(mechanism, *s, args.causal, strategy).and_then(|whole| whole.with_kv_heads(kv_heads));
    let whole = whole.map_err(Error::kernels(&args.input))?;
    warn_of_precision(&whole.clone().with_precision(args.precision));
    let tensors = match args.reference {
        true => {
            let tensors = Tensors::load(file, &whole, layout, args.grad)?;
            operator.accepts(&tensors.inputs().extras).map_err(Error::kernels(&args.input))?;
            one_by_one(args, mechanism, layout, sequences, &tensors)?
        }
        false => {
            let tensors = Tensors::load(file, &whole, layout, args.grad)?;
            together(&operator, &whole, layout, &tensors).map_err(Error::kernels(&args.input))?
        }
    };
    let about = json!({
        "version": env!("CARGO_PKG_VERSION"), "mechanism": mechanism, "causal": args.causal, "sequences": sequences.len(),
    });
    write(&tensors, &about, output, destination)?;
    let done = Done { mechanism, shape, plan: operator.plan() };
    report(&done, &tensors, &super::call::unused(file, mechanism, args.grad), output, global)
}

/// All sequences in one call, in f32.
fn together(
    op: &VarlenOperator,
    whole: &Operator,
    layout: &Layout,
    tensors: &Tensors<f32>,
) -> kernels::Result<Vec<Named>> {
    let (given, mask, s) = (tensors.inputs(), tensors.mask(false), &layout.shape);
    let names = Names { op: whole, layout };
    let mut inputs = VarlenInputs {
        q: Strided::heads_first(given.q, [s.heads, s.seq_q, s.head_dim]),
        k: given.k.map(|k| Strided::heads_first(k, [layout.kv_heads, s.seq_kv, s.head_dim])),
        v: Strided::heads_first(given.v, [layout.kv_heads, s.seq_kv, s.value_dim]),
        extras: given.extras,
        clusters: None,
    };
    let mut scratch = Scratch::default();
    let plans;
    if op.mechanism().clustering().is_some() {
        plans = op.clusters(&inputs, &mask, &mut scratch)?;
        inputs.clusters = Some(&plans);
    }
    op.plan().check_memory(tensors.dout.is_some())?;
    let (mut out, mut stats) = (vec![0.0; s.out_len()], vec![0.0; op.plan().stats]);
    op.forward(
        &inputs,
        &mask,
        Strided::heads_first(&mut out[..], [s.heads, s.seq_q, s.value_dim]),
        &mut stats,
        &mut scratch,
    )?;
    let mut results = vec![names.out(&out)];
    results.extend(op.lse(&stats).map(|lse| names.lse(&lse)));
    let Some(dout) = &tensors.dout else { return Ok(results) };
    let zeros = |len: usize| vec![0.0_f32; len];
    let (mut dq, mut dv) = (zeros(given.q.len()), zeros(given.v.len()));
    let mut dk = given.k.map(|k| zeros(k.len()));
    let mut parameters = compute::parameter_rooms(whole);
    let extras = parameters.iter_mut().fold(ExtraGradients::default(), |extras, (p, room)| extras.with(*p, room));
    let mut gradients = StridedGradients {
        dq: Strided::heads_first(&mut dq[..], [s.heads, s.seq_q, s.head_dim]),
        dk: dk.as_deref_mut().map(|dk| Strided::heads_first(dk, [layout.kv_heads, s.seq_kv, s.head_dim])),
        dv: Strided::heads_first(&mut dv[..], [layout.kv_heads, s.seq_kv, s.value_dim]),
        extras,
    };
    let [out, dout] = [&out, dout].map(|x| Strided::heads_first(&x[..], [s.heads, s.seq_q, s.value_dim]));
    op.backward(&inputs, &mask, out, &stats, dout, &mut gradients, &mut scratch)?;
    results.extend(names.gradients(&dq, dk.as_deref(), &dv));
    results.extend(parameters.iter().map(|(p, gradient)| names.parameter(*p, gradient)));
    Ok(results)
}

/// One call of the reference per sequence, in f64.
fn one_by_one(
    args: &Attend,
    mechanism: &Mechanism,
    layout: &Layout,
    sequences: &Sequences,
    tensors: &Tensors<f64>,
) -> Result<Vec<Named>> {
    let s = &layout.shape;
    let mut whole: Vec<Named> = Vec::new();
    for n in 0..sequences.len() {
        let (queries, keys) = (sequences.range(n), sequences.key_range(n));
        let own = layout.of_shape(Shape { seq_q: queries.len(), seq_kv: keys.len(), ..*s });
        let of_sequence =
            |error| Error::kernels(&args.input)(kernels::Error::Sequence { sequence: n, error: Box::new(error) });
        let operator = Operator::new(mechanism, own.shape, args.causal, Strategy::Reference).map_err(of_sequence)?;
        check_memory(&operator, args.reference && args.grad, &args.input)?;
        let tensors = tensors.of_sequence(layout, [&queries, &keys]);
        for part in compute::reference(&operator, &own, &tensors, args).map_err(of_sequence)? {
            let [heads, rows, all] = match part.name {
                "out" | "lse" | "dq" => [s.heads, queries.start, s.seq_q],
                "dk" | "dv" => [layout.kv_heads, keys.start, s.seq_kv],
                _ => [0; 3],
            };
            match whole.iter_mut().find(|tensor| tensor.name == part.name) {
                Some(tensor) if heads == 0 => tensor.add::<f64>(&part),
                Some(tensor) => tensor.put_rows(&part, heads, rows, all),
                None if heads == 0 => whole.push(part),
                None => {
                    let mut tensor = part.lengthened(all);
                    tensor.put_rows(&part, heads, rows, all);
                    whole.push(tensor);
                }
            }
        }
    }
    Ok(whole)
}
