//! Others' ways to the results of our mechanisms, for measurements side by side: Burn's and candle's attention in this
//! process, and peers in processes of their own.

mod burn;
#[cfg(feature = "candle")]
mod candle;
mod peer;

use std::{cell::RefCell, path::Path, rc::Rc};

use resolvent_kernels::{Mechanism, Shape};

use super::{BenchOptions, contender::Contender};
use crate::Result;
use peer::{Peer, PeerCase};

/// Who is there to compete with.
pub(super) struct Rivals {
    in_process: bool,
    compiled: bool,
    peer: Option<Rc<RefCell<Peer>>>,
}

/// One way of a rival to the result of one mechanism.
#[derive(Debug, Clone)]
pub(super) struct Rival {
    /// What it is called in tables.
    pub label: String,
    way: Way,
}

#[derive(Debug, Clone)]
enum Way {
    Burn,
    #[cfg(feature = "candle")]
    Candle,
    Peer(String),
}

impl Rivals {
    /// The rivals that the options ask for, and why the peer is not among them if it could not be started.
    pub fn find(options: &BenchOptions) -> (Self, Option<String>) {
        let start = |python: &Path| Peer::start(python, options);
        let (peer, missing) = match options.peers.as_deref().map(start).transpose() {
            Ok(peer) => (peer.map(|peer| Rc::new(RefCell::new(peer))), None),
            Err(why) => (None, Some(why.to_string())),
        };
        (Self { in_process: options.rivals, compiled: options.compiled, peer }, missing)
    }

    /// The peer's name and version.
    pub fn peer(&self) -> Option<String> {
        self.peer.as_ref().map(|peer| peer.borrow().name().into())
    }

    /// Those that compute `mechanism`, which is called `name`.
    pub fn of(&self, name: &str, mechanism: &Mechanism) -> Vec<Rival> {
        let mut rivals = Vec::new();
        let mut rival = |label: String, way| rivals.push(Rival { label, way });
        if self.in_process && matches!(mechanism, Mechanism::Softmax(m) if *m == Default::default()) {
            rival(format!("burn {name}"), Way::Burn);
            #[cfg(feature = "candle")]
            rival(format!("candle {name}"), Way::Candle);
        }
        let ways = self.peer.iter().flat_map(|peer| peer.borrow().ways(mechanism.id()));
        for way in ways.filter(|way| self.compiled || way != "compiled") {
            rival(format!("torch {way} {name}"), Way::Peer(way));
        }
        rivals
    }

    /// A rival at one size.
    pub fn contender(&self, rival: &Rival, mechanism: &Mechanism, shape: Shape) -> Box<dyn Contender> {
        match &rival.way {
            Way::Burn => Box::new(burn::Burn::default()),
            #[cfg(feature = "candle")]
            Way::Candle => Box::new(candle::Candle::default()),
            Way::Peer(way) => {
                let peer = self.peer.clone().expect("only a peer that runs has ways");
                Box::new(PeerCase::new(peer, mechanism, way, shape))
            }
        }
    }

    /// Ends a size: peers give back its tensors.
    pub fn clear(&self) -> Result<()> {
        self.peer.as_ref().map_or(Ok(()), |peer| peer.borrow_mut().clear())
    }
}
