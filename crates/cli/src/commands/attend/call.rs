//! The tensors of one call: which there are, whether they fit, and their elements.

use std::ops::Range;

use resolvent_kernels::{
    self as kernels, Extras, Inputs, Mask, Mechanism, Operator, Parameter, Shape, Strategy, inner::HeadGroups,
    mechanism::Bias,
};

use super::{
    clusters::{Clusters, reads},
    sequences::is_bounds,
};
use crate::{
    Error,
    error::Result,
    tensors::{Named, Real, Stored, TensorFile},
};

/// The sizes of a call, and the rank that its tensors are stored with.
#[derive(Debug)]
pub struct Layout {
    /// With a missing batch or head axis as 1.
    pub shape: Shape,
    /// 2 to 4.
    rank: usize,
    /// Heads of keys and values; each serves as many heads of queries in a row.
    pub kv_heads: usize,
}

impl Layout {
    /// Checks `q`, `k` and `v` against each other.
    ///
    /// # Errors
    /// A missing or superfluous tensor, a rank other than 2 to 4, an empty axis, or shapes that do not fit.
    pub fn read(file: &TensorFile, mechanism: &Mechanism) -> Result<Self> {
        let q = file.require("q", "store the queries under this name")?;
        let v = file.require("v", "store the values under this name")?;
        let [batch, heads, seq_q, head_dim] = axes(&q)?;
        let [_, v_heads, seq_kv, value_dim] = axes(&v)?;
        let tied = mechanism.tied;
        let keys = if tied { seq_q } else { seq_kv };
        let kv_heads = if !tied && heads.is_multiple_of(v_heads) { v_heads } else { heads };
        fit(
            file,
            ("v", &v),
            ("q", &q),
            &[batch, kv_heads, keys, value_dim],
            match tied {
                true => "the mechanism is tied (the keys are `q`): v needs the batch, heads and tokens of q",
                false => "v needs the batch and heads of q (or fewer, that divide them), a row per key",
            },
        )?;
        match file.get("k") {
            Some(_) if tied => {
                let problem = "is given although the mechanism is tied (the keys are `q`); leave it out";
                let error = kernels::Error::Tensor { op: "attend", tensor: "k", problem };
                return Err(Error::kernels(file.path())(error));
            }
            None if !tied => drop(file.require("k", "only a tied mechanism has none")?),
            Some(k) => {
                let [_, heads_of_k, seq_of_k, _] = axes(&k)?;
                let expected = [batch, kv_heads, keys, head_dim];
                let beside = if [heads_of_k, seq_of_k] == [kv_heads, keys] { ("q", &q) } else { ("v", &v) };
                fit(
                    file,
                    ("k", &k),
                    beside,
                    &expected,
                    "k needs the batch and head_dim of q, the heads and seq_kv of v",
                )?;
            }
            None => {}
        }
        let shape = Shape { batch, heads, seq_q, seq_kv, head_dim, value_dim };
        Ok(Self { shape, rank: q.shape.len(), kv_heads })
    }

    /// Some of the heads, each with keys of its own.
    pub fn of_heads(&self, heads: usize) -> Self {
        Self { kv_heads: heads, ..self.of_shape(Shape { heads, ..self.shape }) }
    }

    /// Tensors of other sizes, stored likewise.
    pub fn of_shape(&self, shape: Shape) -> Self {
        Self { shape, ..*self }
    }

    /// Gradients of all heads of queries as those of the heads of keys that they share; other tensors as they are.
    pub fn of_shared<R: Real>(&self, tensor: Named) -> Named {
        let s = &self.shape;
        let cols = match tensor.name {
            "dk" if self.kv_heads < s.heads => s.head_dim,
            "dv" if self.kv_heads < s.heads => s.value_dim,
            _ => return tensor,
        };
        Named::new(
            tensor.name,
            self.stored(&[s.batch, self.kv_heads, s.seq_kv, cols]),
            &self.summed(s.heads, &tensor.values::<R>()),
        )
    }

    /// Heads of keys and values that a call takes: those of the file, and for the reference one for every head of queries.
    pub fn heads_taken(&self, reference: bool) -> usize {
        if reference { self.shape.heads } else { self.kv_heads }
    }

    /// Keys or values of `held` heads, once for every head of queries.
    pub fn repeated<R: Copy>(&self, held: usize, x: &[R]) -> Vec<R> {
        HeadGroups::new(self.shape.batch, self.shape.heads, held).repeat(x)
    }

    /// The gradients of keys or values as the file has these, from those of `held` heads.
    pub fn summed<R: Real>(&self, held: usize, x: &[R]) -> Vec<R> {
        let wide: Vec<f64> = x.iter().map(|&x| x.into()).collect();
        let real = |x: f64| R::of_f64(x).unwrap_or_else(|| R::from(x as f32));
        let groups = HeadGroups::new(self.shape.batch, held, self.kv_heads);
        groups.sum(&wide, |a, b| a + b).into_iter().map(real).collect()
    }

    /// The shape under which a parameter is stored.
    pub fn parameter(&self, operator: &Operator, parameter: Parameter) -> Vec<usize> {
        let shape = operator.mechanism().parameter_shape(parameter, operator.shape());
        if parameter == Parameter::GivenLandmarks { self.stored(&shape) } else { shape }
    }

    /// The shape under which `[batch, heads, ...]` is stored: without the axes that the inputs do not have.
    pub fn stored(&self, shape: &[usize]) -> Vec<usize> {
        shape[4 - self.rank..].to_vec()
    }
}

/// The axes `[batch, heads, sequence, channels]`, none empty.
fn axes(tensor: &Stored<'_>) -> Result<[usize; 4]> {
    let shape = tensor.shape;
    if !(2..=4).contains(&shape.len()) {
        return Err(tensor.error(format!("has shape {shape:?}; expected [B, H, N, D], [H, N, D] or [N, D]")));
    }
    if shape.contains(&0) {
        return Err(tensor.error(format!("has shape {shape:?}; no axis may be empty")));
    }
    let mut axes = [1; 4];
    axes[4 - shape.len()..].copy_from_slice(shape);
    Ok(axes)
}

/// Whether `left` has the axes `expected` and the rank of `right`.
fn fit(
    file: &TensorFile,
    (left, l): (&'static str, &Stored<'_>),
    (right, r): (&'static str, &Stored<'_>),
    expected: &[usize; 4],
    remedy: &'static str,
) -> Result<()> {
    let missing = 4 - r.shape.len();
    if l.shape == &expected[missing..] && expected[..missing].iter().all(|&n| n == 1) {
        return Ok(());
    }
    let (left_shape, right_shape) = (l.shape.to_vec(), r.shape.to_vec());
    Err(Error::kernels(file.path())(kernels::Error::Shape {
        op: "attend",
        left,
        left_shape,
        right,
        right_shape,
        remedy,
    }))
}

/// The mechanism, told how many landmarks the file gives it.
pub fn with_given_landmarks(mechanism: Mechanism, file: &TensorFile) -> Mechanism {
    match file.get(Parameter::GivenLandmarks.name()).as_ref().map(|landmarks| landmarks.shape) {
        Some([.., count, _]) => mechanism.with_given_landmarks(*count),
        _ => mechanism,
    }
}

/// The names of the tensors that the call does not read.
pub fn unused(file: &TensorFile, mechanism: &Mechanism, grad: bool) -> Vec<String> {
    let read = |name: &str| match name {
        "q" | "k" | "v" | "key_mask" | "query_mask" => true,
        "dout" => grad,
        _ if is_bounds(name) => true,
        "landmark_indices" => mechanism.drawn_landmarks().is_some(),
        _ => reads(file, mechanism, name) || mechanism.parameters().iter().any(|parameter| parameter.name() == name),
    };
    file.names().into_iter().filter(|name| !read(name)).collect()
}

/// The elements of a call's tensors.
#[derive(Debug)]
pub struct Tensors<R> {
    q: Vec<R>,
    k: Option<Vec<R>>,
    v: Vec<R>,
    parameters: Vec<(Parameter, Vec<f32>)>,
    clusters: Clusters,
    landmark_indices: Option<Vec<i64>>,
    key_mask: Option<Vec<bool>>,
    query_mask: Option<Vec<bool>>,
    /// The gradient that comes in; there iff gradients are asked for.
    pub dout: Option<Vec<R>>,
}

impl<R: Real> Tensors<R> {
    /// Reads everything that `operator` needs: keys and values of as many heads as it takes.
    ///
    /// # Errors
    /// A missing `dout`, a wrong type or shape, a value that is not finite, a mask with other values than 0 and 1.
    pub fn load(file: &TensorFile, operator: &Operator, layout: &Layout, grad: bool) -> Result<Self> {
        let s = &layout.shape;
        let reals = |name| file.get(name).map(|t| t.reals()).transpose();
        let of_keys = |name| {
            let shared = operator.kv_heads() == layout.kv_heads;
            Ok::<_, Error>(reals(name)?.map(|x| if shared { x } else { layout.repeated(layout.kv_heads, &x) }))
        };
        let dout = if grad {
            let dout = file.require("dout", "--grad needs the gradient of the output")?;
            let shape = layout.stored(&[s.batch, s.heads, operator.out_seq(), s.value_dim]);
            expect(&dout, &shape, "the shape of the output")?;
            Some(dout.reals()?)
        } else {
            None
        };
        Ok(Self {
            q: reals("q")?.unwrap_or_default(),
            k: of_keys("k")?,
            v: of_keys("v")?.unwrap_or_default(),
            parameters: parameters(file, operator, layout)?,
            landmark_indices: landmark_indices(file, operator)?,
            clusters: Clusters::load(file, operator.mechanism(), layout)?,
            key_mask: mask(file, "key_mask", layout, s.seq_kv)?,
            query_mask: mask(file, "query_mask", layout, s.seq_q)?,
            dout,
        })
    }

    /// As [`Self::load`], without what a mechanism has of its own; `dout` is of every query.
    pub fn load_alone(file: &TensorFile, layout: &Layout, grad: bool) -> Result<Self> {
        let softmax = Mechanism::default();
        let operator = Operator::new(&softmax, layout.shape, false, Strategy::Reference);
        let operator = operator.and_then(|operator| operator.with_kv_heads(layout.kv_heads));
        Self::load(file, &operator.map_err(Error::kernels(file.path()))?, layout, grad)
    }

    /// The tensors of some heads, each with keys of its own, for a call with `operator`, whose output may be one row for all tokens.
    pub fn of_heads(&self, layout: &Layout, heads: &[usize], operator: &Operator) -> Self {
        let s = &layout.shape;
        let take = |x: &[R], stored: usize| -> Vec<R> {
            let (one, serves) = (x.len() / (s.batch * stored), s.heads / stored);
            let of = |batch: usize| heads.iter().map(move |head| batch * stored + head / serves);
            (0..s.batch).flat_map(of).flat_map(|at| &x[at * one..][..one]).copied().collect()
        };
        let pooled = operator.out_seq() != s.seq_q;
        let dout = self.dout.as_ref().map(|dout| take(dout, s.heads));
        Self {
            q: take(&self.q, s.heads),
            k: self.k.as_ref().map(|k| take(k, layout.kv_heads)),
            v: take(&self.v, layout.kv_heads),
            parameters: Vec::new(),
            clusters: Clusters::default(),
            landmark_indices: None,
            key_mask: self.key_mask.clone(),
            query_mask: self.query_mask.clone(),
            dout: dout.map(|dout| if pooled { self.summed_over_tokens(&dout, heads.len(), operator) } else { dout }),
        }
    }

    /// The tensors of one sequence of a batch of one, by its queries and keys.
    pub fn of_sequence(&self, layout: &Layout, [queries, keys]: [&Range<usize>; 2]) -> Self {
        let rows = |x: &[R], range: &Range<usize>, tokens: usize| -> Vec<R> {
            let row = x.len() / layout.shape.heads / tokens;
            let heads = x.chunks(tokens * row);
            heads.flat_map(|head| &head[range.start * row..range.end * row]).copied().collect()
        };
        let Shape { seq_q, seq_kv, .. } = layout.shape;
        let keep =
            |mask: &Option<Vec<bool>>, range: &Range<usize>| mask.as_ref().map(|keep| keep[range.clone()].to_vec());
        Self {
            q: rows(&self.q, queries, seq_q),
            k: self.k.as_ref().map(|k| rows(k, keys, seq_kv)),
            v: rows(&self.v, keys, seq_kv),
            parameters: self.parameters.clone(),
            clusters: self.clusters.clone(),
            landmark_indices: self.landmark_indices.clone(),
            key_mask: keep(&self.key_mask, keys),
            query_mask: keep(&self.query_mask, queries),
            dout: self.dout.as_ref().map(|dout| rows(dout, queries, seq_q)),
        }
    }

    /// The gradient of a row that stands for all queries that are there.
    fn summed_over_tokens(&self, dout: &[R], heads: usize, operator: &Operator) -> Vec<R> {
        let (tokens, channels) = (operator.shape().seq_q, operator.shape().value_dim);
        let sum = |(head, rows): (usize, &[R])| {
            let mut sums = vec![0.0_f64; channels];
            for (token, row) in rows.chunks(channels).enumerate() {
                if self.keeps(head / heads, token, tokens) {
                    sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += x.into());
                }
            }
            sums
        };
        let sums = dout.chunks(tokens * channels).enumerate().flat_map(sum);
        sums.map(|x| R::of_f64(x).unwrap_or_else(|| R::from(x as f32))).collect()
    }

    fn keeps(&self, batch: usize, token: usize, tokens: usize) -> bool {
        self.query_mask.as_ref().is_none_or(|mask| mask[batch * tokens + token])
    }

    /// A result with its one row repeated for every query that is there, where `operator` has one for all.
    pub fn for_all_tokens(&self, result: Named, operator: &Operator) -> Named {
        let (s, rows) = (operator.shape(), operator.out_seq());
        if rows == s.seq_q || !["out", "weights"].contains(&result.name) {
            return result;
        }
        let values = result.values::<R>();
        let columns = values.len() / (s.batch * s.heads);
        let row = |(head, row): (usize, &[R])| {
            let token = |token: usize| match self.keeps(head / s.heads, token, s.seq_q) {
                true => row.to_vec(),
                false => vec![R::from(0.0); columns],
            };
            (0..s.seq_q).flat_map(token).collect::<Vec<R>>()
        };
        let all: Vec<R> = values.chunks(columns).enumerate().flat_map(row).collect();
        let mut shape = result.shape.clone();
        let rows_axis = shape.len() - 2;
        shape[rows_axis] = s.seq_q;
        Named::new(result.name, shape, &all)
    }

    /// The inputs, as the kernels take them.
    pub fn inputs(&self) -> Inputs<'_, R> {
        let mut extras = Extras::default();
        extras.landmark_indices = self.landmark_indices.as_deref();
        let extras = self.parameters.iter().fold(extras, |extras, (p, values)| extras.with(*p, values));
        Inputs { q: &self.q, k: self.k.as_deref(), v: &self.v, extras: self.clusters.extend(extras) }
    }

    /// The masks, as the kernels take them.
    pub fn mask(&self, causal: bool) -> Mask<'_> {
        Mask { causal, key: self.key_mask.as_deref(), query: self.query_mask.as_deref() }
    }
}

/// The mechanism's own tensors that the file has.
fn parameters(file: &TensorFile, operator: &Operator, layout: &Layout) -> Result<Vec<(Parameter, Vec<f32>)>> {
    let mut found = Vec::new();
    for parameter in operator.mechanism().parameters() {
        if let Some(tensor) = file.get(parameter.name()) {
            let shape = layout.parameter(operator, parameter);
            expect(&tensor, &shape, "what the mechanism needs of it")?;
            let values = match operator.mechanism().bias {
                Some(Bias::Tensor(_)) if parameter == Parameter::Bias => tensor.added()?,
                _ => tensor.reals()?,
            };
            found.push((parameter, values));
        }
    }
    Ok(found)
}

/// The tokens that the file wants for landmarks.
fn landmark_indices(file: &TensorFile, operator: &Operator) -> Result<Option<Vec<i64>>> {
    let (Some(count), Some(tensor)) = (operator.mechanism().drawn_landmarks(), file.get("landmark_indices")) else {
        return Ok(None);
    };
    expect(&tensor, &[operator.shape().batch, count], "one row of landmarks.count tokens per batch entry")?;
    tensor.integers().map(Some)
}

fn mask(file: &TensorFile, name: &'static str, layout: &Layout, seq: usize) -> Result<Option<Vec<bool>>> {
    let Some(mask) = file.get(name) else { return Ok(None) };
    if !(layout.rank == 2 && mask.shape == [seq]) {
        let what = if layout.rank == 2 { "one value per token" } else { "one row per batch entry" };
        expect(&mask, &[layout.shape.batch, seq], what)?;
    }
    mask.mask().map(Some)
}

/// [`Error::File`] unless the tensor has this shape.
pub(super) fn expect(tensor: &Stored<'_>, shape: &[usize], what: &str) -> Result<()> {
    if tensor.shape == shape {
        return Ok(());
    }
    Err(tensor.error(format!("has shape {:?}, expected {shape:?}: {what}", tensor.shape)))
}
