//! The two ways of computing a call: fused in f32, naively in f64.

use resolvent_kernels::{
    ClusterPlan, ExtraGradients, Gradients, Inputs, Mask, Operator, Parameter, Result, Scratch, check_memory, reference,
};

use super::{
    Attend,
    call::{Layout, Tensors},
    clusters::{certificate, stored},
};
use crate::tensors::{Named, Real};

/// The fused path; `weights`, which it never forms, come from the reference.
pub fn fused(op: &Operator, layout: &Layout, tensors: &Tensors<f32>, args: &Attend) -> Result<Vec<Named>> {
    let (mut inputs, mask) = (tensors.inputs(), tensors.mask(args.causal));
    let names = Names { op, layout };
    let clustered = op.mechanism().clustering().is_some();
    // One plan for everything that is written; mechanisms without clusters refuse what is asked of them.
    let plan;
    let mut described = Vec::new();
    if clustered || args.clusters || args.certificate {
        plan = op.clusters(&inputs, &mask)?;
        described = describe(&plan, op, layout, &inputs, &mask, args)?;
        inputs.extras = inputs.extras.with_clusters(&plan);
    }
    check_room(op, tensors.dout.is_some())?;
    let mut scratch = Scratch::default();
    let mut out = vec![0.0_f32; op.out_len()];
    let mut stats = vec![0.0; op.plan().stats];
    op.forward(&inputs, &mask, &mut out, &mut stats, &mut scratch)?;
    let mut results = vec![names.out(&out)];
    results.extend(op.lse(&stats).map(|lse| names.lse(lse)));
    results.extend(described);
    if args.weights {
        let weights = dense(op, layout, &inputs, &mask)?;
        results.push(names.weights(&weights.iter().map(|&x| x as f32).collect::<Vec<_>>()));
    }
    let Some(dout) = &tensors.dout else { return Ok(results) };
    let zeros = |len: usize| vec![0.0_f32; len];
    let (mut dq, mut dv) = (zeros(inputs.q.len()), zeros(inputs.v.len()));
    let mut dk = inputs.k.map(|k| zeros(k.len()));
    let mut parameters = parameter_rooms(op);
    let extras = parameters.iter_mut().fold(ExtraGradients::default(), |extras, (p, room)| extras.with(*p, room));
    let mut gradients = Gradients { dq: &mut dq, dk: dk.as_deref_mut(), dv: &mut dv, extras };
    op.backward(&inputs, &mask, &out, &stats, dout, &mut gradients, &mut scratch)?;
    results.extend(names.gradients(&dq, dk.as_deref(), &dv));
    results.extend(parameters.iter().map(|(p, gradient)| names.parameter(*p, gradient)));
    Ok(results)
}

/// Refuses what the machine has no memory for: an allocation that fails ends the process.
fn check_room(op: &Operator, differentiated: bool) -> Result<()> {
    let (mechanism, shape) = (op.mechanism(), op.shape());
    let own: usize = mechanism.parameters().iter().map(|&parameter| mechanism.parameter_len(parameter, shape)).sum();
    check_memory("attend", if differentiated { 4 * own as u64 } else { 0 })?;
    op.plan().check_memory(differentiated)
}

/// Room for the gradients of the mechanism's own tensors.
pub fn parameter_rooms(op: &Operator) -> Vec<(Parameter, Vec<f32>)> {
    let (mechanism, shape) = (op.mechanism(), op.shape());
    let room = |&p: &Parameter| (p, vec![0.0; mechanism.parameter_shape(p, shape).iter().product()]);
    mechanism.parameters().iter().map(room).collect()
}

/// The dense matrix that maps `v` to `out`.
fn dense(op: &Operator, layout: &Layout, inputs: &Inputs<'_, f32>, mask: &Mask<'_>) -> Result<Vec<f64>> {
    let wide = |x: &[f32]| x.iter().map(|&x| x.into()).collect::<Vec<f64>>();
    let of_keys = |x: &[f32]| layout.repeated(op.kv_heads(), &wide(x));
    let (q, k, v) = (wide(inputs.q), inputs.k.map(of_keys), of_keys(inputs.v));
    let inputs = Inputs { q: &q, k: k.as_deref(), v: &v, extras: inputs.extras };
    Ok(reference::forward(op.mechanism(), op.shape(), &inputs, mask)?.weights().to_vec())
}

/// The naive path.
pub fn reference(op: &Operator, layout: &Layout, tensors: &Tensors<f64>, args: &Attend) -> Result<Vec<Named>> {
    let (mut inputs, mask) = (tensors.inputs(), tensors.mask(args.causal));
    let names = Names { op, layout };
    let plan;
    let mut described = Vec::new();
    if args.clusters || args.certificate {
        plan = reference::clusters(op.mechanism(), op.shape(), &inputs, &mask)?;
        let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
        let (q, k, v) = (narrow(inputs.q), inputs.k.map(narrow), narrow(inputs.v));
        let rounded = Inputs { q: &q, k: k.as_deref(), v: &v, extras: inputs.extras };
        described = describe(&plan, op, layout, &rounded, &mask, args)?;
        inputs.extras = inputs.extras.with_clusters(&plan);
    }
    let forward = reference::forward(op.mechanism(), op.shape(), &inputs, &mask)?;
    let mut results = vec![names.out(&forward.out)];
    results.extend(forward.lse.as_deref().map(|lse| names.lse(lse)));
    results.extend(described);
    if args.weights {
        results.push(names.weights(forward.weights()));
    }
    if let Some(dout) = &tensors.dout {
        let g = reference::backward(op.mechanism(), op.shape(), &inputs, &mask, dout)?;
        results.extend(names.gradients(&g.dq, g.dk.as_deref(), &g.dv));
        results.extend(g.parameters.iter().map(|(p, gradient)| names.parameter(*p, gradient)));
    }
    Ok(results)
}

/// A plan and its certificate, where they are asked for.
fn describe(
    plan: &ClusterPlan,
    op: &Operator,
    layout: &Layout,
    inputs: &Inputs<'_, f32>,
    mask: &Mask<'_>,
    args: &Attend,
) -> Result<Vec<Named>> {
    let mut results = if args.clusters { stored(plan, layout) } else { Vec::new() };
    if args.certificate {
        let of_keys = |x: &[f32]| layout.repeated(op.kv_heads(), x);
        let (k, v) = (inputs.k.map(of_keys), of_keys(inputs.v));
        let inputs = Inputs { k: k.as_deref(), v: &v, ..*inputs };
        let bounds = plan.certificate(op.mechanism(), op.shape(), &inputs, mask)?;
        results.extend(certificate(&bounds, layout));
    }
    Ok(results)
}

/// What results are called, and their shapes.
pub struct Names<'a> {
    pub op: &'a Operator,
    pub layout: &'a Layout,
}

impl Names<'_> {
    fn named<R: Real>(&self, name: &'static str, [rows, cols]: [usize; 2], values: &[R]) -> Named {
        let s = self.op.shape();
        Named::new(name, self.layout.stored(&[s.batch, s.heads, rows, cols]), values)
    }

    pub fn out<R: Real>(&self, out: &[R]) -> Named {
        self.named("out", [self.op.out_seq(), self.op.shape().value_dim], out)
    }

    pub fn lse<R: Real>(&self, lse: &[R]) -> Named {
        let mut named = self.named("lse", [self.op.shape().seq_q, 1], lse);
        named.shape.pop();
        named
    }

    fn weights<R: Real>(&self, weights: &[R]) -> Named {
        self.named("weights", [self.op.out_seq(), self.op.shape().seq_kv], weights)
    }

    pub fn gradients<R: Real>(&self, dq: &[R], dk: Option<&[R]>, dv: &[R]) -> Vec<Named> {
        let s = self.op.shape();
        let of_keys = |name, cols, gradient: &[R]| {
            let shape = self.layout.stored(&[s.batch, self.layout.kv_heads, s.seq_kv, cols]);
            Named::new(name, shape, &self.layout.summed(self.op.kv_heads(), gradient))
        };
        let mut all = vec![self.named("dq", [s.seq_q, s.head_dim], dq)];
        all.extend(dk.map(|dk| of_keys("dk", s.head_dim, dk)));
        all.push(of_keys("dv", s.value_dim, dv));
        all
    }

    pub fn parameter<R: Real>(&self, parameter: Parameter, gradient: &[R]) -> Named {
        Named::new(parameter.gradient_name(), self.layout.parameter(self.op, parameter), gradient)
    }
}
