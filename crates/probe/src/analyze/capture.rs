//! A dump of what a trained model's attention is given.

use std::path::Path;

use resolvent_kernels::Mechanism;
use resolvent_lab::{Error, Result, disk::write_atomically, stop};
use safetensors::{Dtype, tensor::TensorView};

use super::Learned;
use crate::subject::{Example, LayerCall, Subject};

/// A tensor of the dump: its name, type, shape and bytes.
type Named = (String, Dtype, Vec<usize>, Vec<u8>);

/// Writes queries, keys and values of every layer of `subject` on `examples` to `path`, a file that [`super::Dump`] reads: as the
/// operator sees them, after norms, projections and rotary positions. Shorter texts end in zeros, and `key_mask` says where.
/// Returns the mechanism that all layers have, on their grid, and the recipe's where they differ; and what they have learned for it.
///
/// # Errors
/// Those of [`Subject::trace`], [`Error::Io`]; [`Error::Unfit`] where there is no example.
pub fn capture(subject: &Subject, examples: &[Example], path: &Path) -> Result<(Mechanism, Learned)> {
    let traces = examples
        .iter()
        .map(|example| stop::check().and_then(|()| subject.trace(example)))
        .collect::<Result<Vec<_>>>()?;
    let Some(first) = traces.first() else {
        let problem = "there is nothing to show the model; give at least one example".into();
        return Err(Error::Unfit { name: subject.path.clone(), problem });
    };
    let of_layer = |layer| tensors(&traces.iter().map(|trace| &trace[layer]).collect::<Vec<_>>());
    let tensors: Vec<Named> = (0..first.len()).flat_map(of_layer).collect();
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        TensorView::new(*dtype, shape.clone(), bytes).map(|view| (name.clone(), view))
    });
    let views = views.collect::<std::result::Result<Vec<_>, _>>();
    let file = views.and_then(|views| safetensors::serialize(views, None));
    write_atomically(path, &file.map_err(|e| Error::damaged(path, e.to_string()))?)?;
    let mut mechanisms = traces.iter().flatten().map(|call| &call.mechanism);
    let own = mechanisms.next().cloned();
    let shared = own.filter(|own| mechanisms.all(|other| other == own));
    let own = shared.unwrap_or_else(|| subject.recipe.mechanism.clone());
    let own = if subject.is_causal() { super::with(&own, "causal") } else { own };
    Ok((own.clone(), Learned::new(own, first)))
}

/// The tensors of one layer, of which there is a call per example.
fn tensors(calls: &[&LayerCall]) -> Vec<Named> {
    let first = calls[0];
    let name = |tensor: &str| format!("{}.{tensor}", first.place.name);
    let tokens = calls.iter().map(|call| call.shape.seq_q).max().unwrap_or(0);
    let shape = vec![calls.len(), first.shape.heads, tokens, first.shape.head_dim];
    let stacked = |tensor: &str, pick: fn(&LayerCall) -> Option<&[f32]>| {
        let rows = calls.iter().map(|call| Some(padded(pick(call)?, call.shape.heads, tokens * call.shape.head_dim)));
        Some((name(tensor), Dtype::F32, shape.clone(), rows.collect::<Option<Vec<_>>>()?.concat()))
    };
    let there = |call: &&LayerCall| (0..tokens).map(|token| u8::from(token < call.shape.seq_q)).collect::<Vec<_>>();
    let ragged = calls.iter().any(|call| call.shape.seq_q < tokens);
    let mask = || (name("key_mask"), Dtype::U8, vec![calls.len(), tokens], calls.iter().flat_map(there).collect());
    let parts = [
        stacked("q", |call| Some(&call.q)),
        stacked("k", |call| call.k.as_deref()),
        stacked("v", |call| Some(&call.v)),
    ];
    parts.into_iter().flatten().chain(ragged.then(mask)).collect()
}

/// The bytes of `values`, each head's filled up with zeros to `length` of them.
fn padded(values: &[f32], heads: usize, length: usize) -> Vec<u8> {
    let head = |head: &[f32]| {
        let mut bytes: Vec<u8> = head.iter().flat_map(|x| x.to_le_bytes()).collect();
        bytes.resize(4 * length, 0);
        bytes
    };
    values.chunks_exact((values.len() / heads).max(1)).flat_map(head).collect()
}
