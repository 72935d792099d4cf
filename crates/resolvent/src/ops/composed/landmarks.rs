//! Landmarks of tensors, and the inverse between them.

use burn::tensor::{Shape as Dims, Tensor, TensorData};
use resolvent_kernels::{
    Error, Parameter, Result, inner,
    mechanism::{Inverse, InverseGradient, Landmarks, NewtonInit},
};

use super::Call;
use crate::ops::{Extras, gelu::composed_gelu};

/// Steps after which an inverse that is asked for exactly has converged: a condition of 1e6 takes 30.
const EXACT: usize = 40;

/// The factor on a token at a slot, given all members of its window.
type Weight<'w> = &'w dyn Fn(&[(usize, usize)], usize) -> f32;

/// What landmarks are made of, read from the masks once.
pub(super) struct Producer<'a> {
    pub landmarks: Landmarks,
    pub grid: Option<[usize; 2]>,
    /// Filters mix all channels, and leave partial windows out.
    pub full: bool,
    pub extras: &'a Extras,
    /// `[batch, seq]`; `None` keeps all.
    pub keep: Option<Vec<bool>>,
}

/// Landmarks `[batch, heads, marks, dim]` and which of them have a token, `[batch, 1, marks, 1]`, as 0 and 1.
pub(super) struct Marks {
    pub u: Tensor<4>,
    pub live: Tensor<4>,
}

impl Producer<'_> {
    fn keeps(&self, b: usize, seq: usize, token: usize) -> bool {
        self.keep.as_ref().is_none_or(|keep| keep[b * seq + token])
    }

    /// The tokens that are random landmarks, `[batch, count]`: those of the call, or drawn as the kernels draw them.
    fn picked(&self, batch: usize, seq: usize) -> Vec<usize> {
        match (&self.extras.landmark_indices, self.landmarks) {
            (Some(given), _) => given.iter().map(|&token| token as usize).collect(),
            (None, Landmarks::Random { count, seed }) => inner::random_landmarks(seed, batch, seq, count),
            _ => Vec::new(),
        }
    }

    /// `(token, slot)` of every landmark, masked tokens left out; `picked` are the random ones.
    fn members(&self, b: usize, seq: usize, picked: &[usize]) -> Vec<Vec<(usize, usize)>> {
        let windows = || {
            let mut members = self.landmarks.members(seq, self.grid, !self.full).unwrap_or_default();
            members.iter_mut().for_each(|window| window.retain(|&(token, _)| self.keeps(b, seq, token)));
            members
        };
        match self.landmarks {
            Landmarks::Pool(_) | Landmarks::Conv { .. } => windows(),
            Landmarks::Stride { ratio } => {
                let centre = ratio / 2 * if self.grid.is_some() { ratio + 1 } else { 1 };
                let nearest = |window: Vec<(usize, usize)>| {
                    let picked = window.into_iter().min_by_key(|&(_, slot)| (slot.abs_diff(centre), slot));
                    Vec::from_iter(picked)
                };
                windows().into_iter().map(nearest).collect()
            }
            Landmarks::First { count } => {
                (0..count).map(|token| Vec::from_iter(self.keeps(b, seq, token).then_some((token, 0)))).collect()
            }
            Landmarks::Random { count, .. } => {
                let picked = picked[b * count..][..count].iter();
                picked.map(|&token| Vec::from_iter(self.keeps(b, seq, token).then_some((token, 0)))).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The landmarks of `x [batch, heads, seq, dim]`, whose masked rows are zero.
    pub fn make(&self, x: &Tensor<4>) -> Marks {
        let [batch, heads, seq, dim] = x.dims();
        if let Some(given) = self.extras.like(Parameter::GivenLandmarks, x) {
            let marks = given.dims()[0] / (batch * heads * dim);
            let u = given.reshape([batch, heads, marks, dim]);
            return Marks { live: Tensor::ones([batch, 1, marks, 1], (&x.device(), x.dtype())), u };
        }
        let picked = self.picked(batch, seq);
        let members: Vec<_> = (0..batch).map(|b| self.members(b, seq, &picked)).collect();
        let marks = members[0].len();
        let live = members.iter().flatten().map(|tokens| f32::from(u8::from(!tokens.is_empty()))).collect();
        let live = constant::<4>(live, [batch, 1, marks, 1], x);
        let select = |weight: Weight<'_>| {
            let mut matrix = vec![0.0; batch * marks * seq];
            for (row, tokens) in members.iter().flatten().enumerate() {
                tokens.iter().for_each(|&(token, slot)| matrix[row * seq + token] = weight(tokens, slot));
            }
            constant::<4>(matrix, [batch, 1, marks, seq], x).expand([batch, heads, marks, seq]).matmul(x.clone())
        };
        let Some(weight) = self.extras.like(Parameter::LandmarkWeight, x) else {
            return Marks { u: select(&|tokens, _| 1.0 / tokens.len() as f32), live };
        };
        let columns = if self.full { dim * dim } else { dim };
        let slots = weight.dims()[0] / columns;
        let weight = weight.reshape([columns, slots]);
        let terms = (0..slots).map(|slot| {
            let tokens = select(&|_, at| if at == slot { 1.0 } else { 0.0 });
            let column = weight.clone().narrow(1, slot, 1);
            if self.full {
                // [out, in] -> [in, out]
                tokens.matmul(column.reshape([1, 1, dim, dim]).swap_dims(2, 3).expand([batch, heads, dim, dim]))
            } else {
                tokens * column.reshape([1, 1, 1, dim])
            }
        });
        let u = terms.reduce(|a, b| a + b).unwrap_or_else(|| x.clone().narrow(2, 0, marks).zeros_like());
        Marks { u, live }
    }
}

/// A tensor of constants on the device of `like`.
pub(super) fn constant<const D: usize>(values: Vec<f32>, shape: impl Into<Dims>, like: &Tensor<4>) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape.into()), (&like.device(), like.dtype()))
}

/// Layer norm over the channels, then exact GELU.
pub(super) fn activate(u: Tensor<4>, extras: &Extras) -> Tensor<4> {
    let [.., dim] = u.dims();
    let of = |parameter| extras.like(parameter, &u).map(|x| x.reshape([1, 1, 1, dim]));
    let centred = u.clone() - u.clone().mean_dim(3);
    let variance = centred.clone().square().mean_dim(3);
    let hat = centred / (variance + 1e-5).sqrt();
    match (of(Parameter::LandmarkNormGamma), of(Parameter::LandmarkNormBeta)) {
        (Some(gamma), Some(beta)) => composed_gelu(hat * gamma + beta),
        _ => composed_gelu(hat),
    }
}

/// How a matrix between landmarks is inverted.
pub(super) struct Method {
    pub mechanism: &'static str,
    pub inverse: Inverse,
    pub steps: usize,
    /// `None` starts from `I / |M|_1`.
    pub init: Option<NewtonInit>,
    pub ridge: f64,
    pub gradient: InverseGradient,
}

impl Method {
    /// The inverse of `a + ridge I` for symmetric `a [batch, heads, m, m]`.
    pub fn invert(&self, a: Tensor<4>) -> Result<Tensor<4>> {
        if self.inverse == Inverse::Eigen {
            let why = "eigenvalues are taken by the fused kernels; move the tensors to Device::flex()";
            return Err(Error::Unsupported { mechanism: self.mechanism, what: "Strategy::Composed", why });
        }
        let exact = self.inverse != Inverse::NewtonSchulz;
        let eye = identity(&a);
        let m = a.clone() + eye.clone() * self.ridge;
        let constant = m.clone().detach();
        let unrolled = !exact && self.gradient == InverseGradient::Unrolled;
        let used = if unrolled { m.clone() } else { constant.clone() };
        let steps = if exact { EXACT } else { self.steps };
        let init = if exact { None } else { self.init };
        let mut x = start(init, a.detach(), constant.clone(), eye, &used);
        for _ in 0..steps {
            let next = x.clone() * 2.0 - x.clone().matmul(used.clone()).matmul(x);
            x = (next.clone() + next.swap_dims(2, 3)) * 0.5;
        }
        if unrolled {
            return Ok(x);
        }
        // The value of `x`, and the gradient of an inverse: -x dM x.
        Ok(x.clone() - x.clone().matmul(m - constant).matmul(x))
    }
}

/// The identity, shaped like `a`.
pub(super) fn identity(a: &Tensor<4>) -> Tensor<4> {
    let n = a.dims()[3];
    Tensor::<2>::eye(n, &a.device())
        .cast(burn::tensor::FloatDType::from(a.dtype()))
        .reshape([1, 1, n, n])
        .expand(a.shape())
}

/// The largest absolute column sum, `[batch, heads, 1, 1]`.
fn norm(a: Tensor<4>) -> Tensor<4> {
    a.abs().sum_dim(2).max_dim(3)
}

/// The first iterate; its factor is a constant.
fn start(init: Option<NewtonInit>, a: Tensor<4>, m: Tensor<4>, eye: Tensor<4>, used: &Tensor<4>) -> Tensor<4> {
    let size = norm(m.clone());
    let square = size.clone() * size.clone();
    match init {
        None => eye / size,
        Some(NewtonInit::Identity) => eye * (size.recip() * 1.8),
        Some(NewtonInit::Scaled) => used.clone() * (square.recip() * 1.8),
        Some(NewtonInit::Official) => {
            let size = norm(a);
            used.clone() * ((size.clone() * size).recip() * 1.8)
        }
        Some(NewtonInit::Paper) => used.clone() * (square.recip() * 2.0),
        Some(NewtonInit::Backtrack) => {
            let product = m.clone().matmul(m);
            let mut alpha = square.recip() * 2.0;
            for _ in 0..10 {
                let far = norm(eye.clone() - product.clone() * alpha.clone()).greater_elem(1.01);
                alpha = alpha.clone().mask_where(far, alpha * 0.5);
            }
            used.clone() * alpha
        }
    }
}

impl Call {
    /// Which keys exist, on the host.
    pub(super) fn keep_key(&self) -> Option<Vec<bool>> {
        self.no_key.as_ref().map(|gone| gone.to_data().iter::<bool>().map(|gone| !gone).collect())
    }

    /// Which queries exist, on the host.
    pub(super) fn keep_query(&self) -> Option<Vec<bool>> {
        self.no_query.as_ref().map(|gone| gone.to_data().iter::<bool>().map(|gone| !gone).collect())
    }

    /// `x` with zeros where keys do not exist; `x` has them along axis 2.
    pub(super) fn of_keys(&self, x: Tensor<4>) -> Tensor<4> {
        super::absent(x, &self.no_key.clone().map(|gone| gone.swap_dims(2, 3)))
    }
}
