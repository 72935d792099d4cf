//! Heads of one layer with mechanisms of their own.

use std::collections::BTreeSet;

use burn::tensor::{Int, Tensor};
use resolvent_kernels as kernels;
use serde::{Deserialize, Serialize};

use super::{MultiHeadAttention, field};
use crate::{
    Error, Extras, Inputs, Mask, Mechanism, Result, attend,
    ops::{merge_heads, split_heads},
};

/// Heads of one layer that have the same mechanism.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeadGroup {
    /// Which, from 0 on.
    pub heads: Vec<usize>,
    /// Their mechanism.
    pub mechanism: Mechanism,
}

impl HeadGroup {
    /// Whether every one of `heads` heads is in one of `groups`, with a mechanism that does not [tell heads apart](Mechanism::tells_heads_apart).
    ///
    /// # Errors
    /// The head that is not, or is twice, or the mechanism, in words.
    pub fn check(groups: &[Self], heads: usize) -> std::result::Result<(), String> {
        if let Some(group) = groups.iter().find(|group| group.mechanism.tells_heads_apart()) {
            let id = group.mechanism.id();
            return Err(format!(
                "`groups`: `{id}` has numbers of single heads, which are others in a group of their own"
            ));
        }
        // Only heads that are named take memory: a file may say of itself that it has any number of them.
        let mut named = BTreeSet::new();
        for (at, &head) in groups.iter().flat_map(|group| &group.heads).enumerate() {
            let why = match head {
                _ if head >= heads => "there are fewer",
                _ if !named.insert(head) => "it is there twice",
                _ => continue,
            };
            return Err(format!("entry {at} of `groups[].heads` is {head}: {why}"));
        }
        let first_missing = named.iter().zip(0..).find(|(head, at)| *head != at).map_or(named.len(), |(_, at)| at);
        if first_missing == heads { Ok(()) } else { Err(format!("`groups`: head {first_missing} has no mechanism")) }
    }
}

fn check(groups: &[HeadGroup], heads: usize) -> Result<()> {
    let told = HeadGroup::check(groups, heads);
    field("groups", told.as_ref().map_or_else(String::as_str, |()| ""), told.is_ok(), "every head once")
}

impl MultiHeadAttention {
    /// Heads of self-attention with mechanisms of their own in place of the module's, which has to be softmax or another one that makes queries,
    /// keys and values of every token; parameters and weights stay as they are, and what the groups' mechanisms could learn is as configured.
    /// No groups: as before.
    ///
    /// Calls over keys of other tokens are then refused. Decoding keeps all projections, and applies the groups to them for each new token.
    ///
    /// # Errors
    /// [`Error::Field`] for groups that leave a head out or name one twice, for mechanisms that are tied or that [tell heads apart](Mechanism::tells_heads_apart), and for a module that adds a bias or a filter, pools
    /// before it projects, or learns parameters of its mechanism.
    pub fn with_head_groups(mut self, groups: Vec<HeadGroup>) -> Result<Self> {
        if !groups.is_empty() {
            for HeadGroup { mechanism, .. } in &groups {
                let alike = !mechanism.tells_heads_apart();
                field("groups[].mechanism", mechanism.id(), alike, "one without a bias and without maps per head")?;
            }
            check(&groups, self.n_heads)?;
            let own = &self.mechanism;
            let learns = self.learned.values().next().is_some() || self.codebook.is_some();
            let adds = own.bias.is_some() || self.value_filter.is_some();
            let pools = self.pool_first && own.pooling().is_some();
            let plain = own.projections() == 3 && !learns && !adds && !pools;
            field(
                "mechanism",
                own.id(),
                plain,
                "softmax or another that makes queries, keys and values, without a bias and without parameters that it learns",
            )?;
            for HeadGroup { mechanism, .. } in &groups {
                field("groups[].mechanism", mechanism.id(), !mechanism.tied, "one with queries and keys")?;
            }
        }
        self.head_groups = groups;
        Ok(self)
    }

    /// Self-attention from projections side by side, group by group: `[batch, seq, d_model]`.
    pub(super) fn attend_by_head(&self, packed: Tensor<3>, extras: &Extras, mask: &Mask) -> Result<Tensor<3>> {
        check(&self.head_groups, self.n_heads)?;
        let Inputs { q, k, v, .. } = split_heads(packed, self.n_heads, &self.mechanism);
        let [_, _, seq, _] = q.dims();
        let device = q.device();
        let places = |heads: &[usize]| {
            let heads: Vec<i64> = heads.iter().map(|&head| head as i64).collect();
            Tensor::<1, Int>::from_data(heads.as_slice(), &device)
        };
        let in_place = matches!(&self.head_groups[..], [all] if all.heads.is_sorted());
        let mut parts = Vec::new();
        for HeadGroup { heads, mechanism } in &self.head_groups {
            let own = |x: &Tensor<4>| if in_place { x.clone() } else { x.clone().select(1, places(heads)) };
            let mut inputs = Inputs::new(own(&q), own(k.as_ref().unwrap_or(&q)), own(&v));
            inputs.extras = extras.without_tensors();
            let out = attend(&inputs, mechanism, mask, self.strategy)?.out;
            let [batch, count, rows, dim] = out.dims();
            parts.push(if rows < seq { out.expand([batch, count, seq, dim]) } else { out });
        }
        if in_place {
            return Ok(merge_heads(parts.swap_remove(0)));
        }
        let order: Vec<usize> = self.head_groups.iter().flat_map(|group| group.heads.iter().copied()).collect();
        let back: Vec<usize> =
            (0..self.n_heads).map(|head| order.iter().position(|&own| own == head).unwrap_or(head)).collect();
        Ok(merge_heads(Tensor::cat(parts, 1).select(1, places(&back))))
    }

    /// Refuses what heads with mechanisms of their own have not.
    pub(super) fn check_one_mechanism(&self) -> Result<()> {
        if self.head_groups.is_empty() {
            return Ok(());
        }
        let why = "heads have mechanisms of their own, in self-attention alone";
        Err(Error::Mechanism(kernels::Error::Unsupported {
            mechanism: self.mechanism.id(),
            what: "cross-attention",
            why,
        }))
    }
}
