//! Others' ways to the results of our mechanisms, for measurements side by side: Burn's and candle's attention in this
//! process, and peers in processes of their own.

mod burn;
#[cfg(feature = "candle")]
mod candle;
mod peer;
mod peer_case;

use std::{cell::RefCell, path::Path, rc::Rc};

use resolvent_kernels::{Mechanism, Precision};

use super::{BenchOptions, Check, TensorType, call::Call, contender::Contender};
use crate::{Error, Result};
use peer::{Peer, Way as PeerWay};
use peer_case::PeerCase;

/// Who is there to compete with.
pub(super) struct Rivals {
    in_process: bool,
    compiled: bool,
    /// Whether bf16 runs beside ours.
    rounded: bool,
    peer: Option<Rc<RefCell<Peer>>>,
}

/// One way of a rival to the result of one mechanism.
#[derive(Debug, Clone)]
pub(super) struct Rival {
    /// What it is called in tables.
    pub label: String,
    /// Type of its tensors, and of its products where that is another.
    pub dtype: TensorType,
    way: Way,
}

#[derive(Debug, Clone)]
enum Way {
    Burn,
    #[cfg(feature = "candle")]
    Candle,
    Peer(PeerWay),
}

impl Rivals {
    /// The rivals that the options ask for, and why others are not among them: a peer that could not be started, and what its Python
    /// lacks.
    pub fn find(options: &BenchOptions) -> (Self, Vec<Check>) {
        let start = |python: &Path| Peer::start(python, options);
        let (peer, missing) = match options.peers.as_deref().map(start).transpose() {
            Ok(Some((peer, missing))) => {
                let missing = missing.into_iter().map(|(framework, why)| Check::refused(&framework, why));
                (Some(Rc::new(RefCell::new(peer))), missing.collect())
            }
            Ok(None) => (None, Vec::new()),
            Err(why) => (None, vec![Check::refused("torch", why.to_string())]),
        };
        let rounded = options.precision == Precision::Bf16;
        (Self { in_process: options.rivals, compiled: options.compiled, rounded, peer }, missing)
    }

    /// The names and versions of the peer's frameworks.
    pub fn peer(&self) -> Option<String> {
        self.peer.as_ref().map(|peer| peer.borrow().name().into())
    }

    /// Those that compute `mechanism`, which is called `name`.
    pub fn of(&self, name: &str, mechanism: &Mechanism) -> Vec<Rival> {
        let mut rivals = Vec::new();
        let mut rival = |label: String, dtype, way| rivals.push(Rival { label, dtype, way });
        if self.in_process && *mechanism == Mechanism::default() {
            rival(format!("burn {name}"), TensorType::Float32, Way::Burn);
            #[cfg(feature = "candle")]
            rival(format!("candle {name}"), TensorType::Float32, Way::Candle);
        }
        let ways = self.peer.iter().flat_map(|peer| peer.borrow().ways(mechanism.id()));
        for way in
            ways.filter(|way| (self.compiled || way.way != "compiled") && (self.rounded || !way.dtype.is_rounded()))
        {
            rival(format!("{} {name}", way.label), way.dtype, Way::Peer(way));
        }
        rivals
    }

    /// A rival at one size.
    ///
    /// # Errors
    /// [`Error::Rival`] for a call that it does not take.
    pub fn contender(&self, rival: &Rival, mechanism: &Mechanism, call: &Call) -> Result<Box<dyn Contender>> {
        if let Way::Peer(way) = &rival.way {
            let peer = self.peer.clone().expect("only a peer that runs has ways");
            return Ok(Box::new(PeerCase::new(peer, mechanism, way, call)));
        }
        if !call.is_plain() {
            let problem = "takes tensors [batch, heads, tokens, channels] of one size; leave out --kv-heads, --layout and --sequences";
            return Err(Error::Rival { name: rival.label.clone(), problem: problem.into() });
        }
        Ok(match &rival.way {
            #[cfg(feature = "candle")]
            Way::Candle => Box::new(candle::Candle::default()),
            _ => Box::new(burn::Burn::default()),
        })
    }

    /// Ends a size: peers give back its tensors.
    pub fn clear(&self) -> Result<()> {
        self.peer.as_ref().map_or(Ok(()), |peer| peer.borrow_mut().clear())
    }
}
