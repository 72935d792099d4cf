//! Heads with mechanisms of their own, as `analyze --fit` finds them: one call per group of heads.

use std::path::Path;

use resolvent::attention::HeadGroup;
use resolvent_kernels::{Operator, Shape, Strategy};
use resolvent_lab::fit::{FitFile, FittedLayer};
use serde_json::json;

use super::{
    Attend,
    call::{Layout, Tensors},
    check_memory, compute, sequences, shape_json, warn_of_precision, write,
};
use crate::{
    Error,
    args::Global,
    destination::Destination,
    error::Result,
    output,
    tensors::{Named, Real, TensorFile},
};

/// The layer of the fit that is asked for.
pub fn layer(args: &Attend, global: &Global, text: &str) -> Result<FittedLayer> {
    let fit = FitFile::parse(text).map_err(|problem| Error::file(&args.config, problem))?;
    let layer = fit.layer(args.layer.as_deref());
    let layer = layer.map_err(|problem| Error::file(&args.config, format!("{problem} (--layer)")))?;
    if args.clusters || args.certificate {
        let problem = "gives heads mechanisms of their own; --clusters and --certificate are of one mechanism: attend with that alone";
        return Err(Error::file(&args.config, problem));
    }
    if fit.causal && !args.causal {
        let problem = "is of tokens that see earlier ones only: add --causal";
        return Err(Error::file(&args.config, problem));
    }
    let mut layer = layer.clone();
    if let Some(seed) = global.seed {
        layer.groups.iter_mut().for_each(|group| group.mechanism = group.mechanism.clone().with_seed(seed));
    }
    Ok(layer)
}

/// Runs the command for `layer`.
pub fn run(
    args: &Attend,
    global: &Global,
    layer: &FittedLayer,
    file: &TensorFile,
    destination: Option<(&Path, Destination)>,
) -> Result<()> {
    let softmax = resolvent_kernels::Mechanism::default();
    let first = layer.groups.first().map_or(&softmax, |group| &group.mechanism);
    let layout = Layout::read(file, first)?;
    if file.names().iter().any(|name| sequences::is_bounds(name)) {
        let problem = "holds sequences end to end (cu_seqlens), which heads with mechanisms of their own do not take: attend to one";
        return Err(Error::file(&args.input, problem));
    }
    if layout.shape.heads != layer.heads {
        let problem = format!(
            "layer `{}` has {} heads, {} has {}",
            layer.name,
            layer.heads,
            args.input.display(),
            layout.shape.heads
        );
        return Err(Error::file(&args.config, problem));
    }
    let strategy = if args.reference { Strategy::Reference } else { Strategy::Auto };
    let operator = |group: &HeadGroup| {
        let shape = Shape { heads: group.heads.len(), ..layout.shape };
        let operator = Operator::new(&group.mechanism, shape, args.causal, strategy);
        operator.map(|operator| operator.with_precision(args.precision)).map_err(Error::kernels(&args.input))
    };
    let operators = layer.groups.iter().map(operator).collect::<Result<Vec<_>>>()?;
    operators.iter().for_each(warn_of_precision);
    let Some((output, destination)) = destination else { return print_plans(layer, &operators, global) };
    if args.reference || args.weights {
        operators.iter().try_for_each(|operator| check_memory(operator, args.reference && args.grad, &args.input))?;
    }
    let tensors = match args.reference {
        true => attend::<f64>(args, layer, file, &layout, &operators, compute::reference)?,
        false => attend::<f32>(args, layer, file, &layout, &operators, compute::fused)?,
    };
    let about = json!({"version": env!("CARGO_PKG_VERSION"), "layer": layer, "causal": args.causal});
    write(&tensors, &about, output, destination)?;
    let shapes = tensors.iter().map(|t| (t.name.to_owned(), json!(t.shape))).collect::<serde_json::Map<_, _>>();
    let json = json!({"layer": layer, "output": output.display().to_string(), "tensors": shapes});
    let listed: Vec<_> = tensors.iter().map(|t| format!("{} {:?}", t.name, t.shape)).collect();
    output::result(global, &json, &format!("{}: {}", output.display(), listed.join(", ")))
}

fn print_plans(layer: &FittedLayer, operators: &[Operator], global: &Global) -> Result<()> {
    let plans = layer.groups.iter().zip(operators).map(|(group, operator)| {
        json!({"heads": group.heads, "mechanism": group.mechanism, "shape": shape_json(operator.shape()), "plan": operator.plan()})
    });
    let plans: Vec<_> = plans.collect();
    let lines = layer.groups.iter().zip(operators).map(|(group, operator)| {
        let plan = operator.plan();
        let (id, arithmetic) = (operator.mechanism().id(), plan.arithmetic);
        let products = format!("{} precision by {}", arithmetic.runs.name(), arithmetic.instructions);
        let what = format!("{id} by {:?}: {}; {products}", plan.strategy, plan.reason);
        format!(
            "heads {:?}: {what}; {:.3e} operations forward, {:.3e} backward",
            group.heads, plan.flops_forward as f64, plan.flops_backward as f64
        )
    });
    output::result(global, &json!({"layer": layer.name, "groups": plans}), &lines.collect::<Vec<_>>().join("\n"))
}

/// What is put together. A group's own tensors are at their defaults, and their gradients not those of a layer.
const OF_TOKENS: [&str; 6] = ["out", "lse", "weights", "dq", "dk", "dv"];

/// How a group is computed.
type Compute<R> = fn(&Operator, &Layout, &Tensors<R>, &Attend) -> resolvent_kernels::Result<Vec<Named>>;

/// Group by group, put together in the order of the heads.
fn attend<R: Real + Default>(
    args: &Attend,
    layer: &FittedLayer,
    file: &TensorFile,
    layout: &Layout,
    operators: &[Operator],
    compute: Compute<R>,
) -> Result<Vec<Named>> {
    let tensors = Tensors::<R>::load_alone(file, layout, args.grad)?;
    let mut whole: Vec<(Named, usize)> = Vec::new();
    for (at, (group, operator)) in layer.groups.iter().zip(operators).enumerate() {
        let own = tensors.of_heads(layout, &group.heads, operator);
        let made =
            compute(operator, &layout.of_heads(group.heads.len()), &own, args).map_err(Error::kernels(&args.input))?;
        for part in made.into_iter().filter(|part| OF_TOKENS.contains(&part.name)) {
            let part = own.for_all_tokens(part, operator);
            match whole.iter_mut().find(|(tensor, _)| tensor.name == part.name) {
                Some((tensor, groups)) => {
                    tensor.put_heads(&part, layout.shape.batch, layer.heads, &group.heads);
                    *groups += 1;
                }
                None if at == 0 => {
                    let mut tensor = part.spread(layout.shape.batch, layer.heads, group.heads.len());
                    tensor.put_heads(&part, layout.shape.batch, layer.heads, &group.heads);
                    whole.push((tensor, 1));
                }
                None => {}
            }
        }
    }
    // What some groups have and others have not, as sums of rows, is nothing of the whole.
    let tensors = whole.into_iter().filter(|&(_, groups)| groups == layer.groups.len()).map(|(tensor, _)| tensor);
    Ok(tensors.map(|tensor| layout.of_shared::<R>(tensor)).collect())
}
