//! A mechanism at one size, computed by a peer.

use std::{cell::RefCell, rc::Rc};

use base64::{Engine, prelude::BASE64_STANDARD};
use resolvent_kernels::{Mechanism, Sequences, Shape};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::{
    super::{
        buffers::{Buffers, Results},
        call::Call,
        contender::Contender,
    },
    peer::{Peer, Way},
};
use crate::{Error, Result, memory::MemoryProbe};

#[derive(Deserialize)]
struct Opened {
    id: usize,
    peak_bytes: [Option<u64>; 2],
}

#[derive(Deserialize)]
struct Ran {
    seconds: (f64, Option<f64>),
}

#[derive(Deserialize)]
struct Solved {
    out: String,
    dq: Option<String>,
    dk: Option<String>,
    dv: Option<String>,
}

/// A mechanism at one size, computed by a peer.
pub(super) struct PeerCase {
    peer: Rc<RefCell<Peer>>,
    request: Value,
    tied: bool,
    trains: bool,
    id: Option<usize>,
}

impl PeerCase {
    pub fn new(peer: Rc<RefCell<Peer>>, mechanism: &Mechanism, way: &Way, call: &Call) -> Self {
        let Shape { batch, heads, seq_q, head_dim, .. } = call.shape;
        let lengths =
            |sequences: &Sequences| (0..sequences.len()).map(|n| sequences.range(n).len()).collect::<Vec<_>>();
        let request = json!({
            "mechanism": mechanism,
            "way": way.way,
            "shape": [batch, heads, seq_q, head_dim],
            "kv_heads": call.kv_heads,
            "tied": mechanism.tied,
            "layout": call.layout,
            "sequences": call.sequences.as_ref().map_or(Vec::new(), lengths),
        });
        Self { peer, request, tied: mechanism.tied, trains: way.trains, id: None }
    }

    fn ask<T: DeserializeOwned>(&self, op: &str) -> Result<T> {
        let mut request = self.request.clone();
        request["op"] = op.into();
        self.peer.borrow_mut().ask(request)
    }

    fn failed(&self, problem: impl Into<String>) -> Error {
        Error::Rival { name: self.peer.borrow().name().into(), problem: problem.into() }
    }

    /// A tensor of `len` elements that the peer has sent.
    fn tensor(&self, text: &str, len: usize) -> Result<Vec<f32>> {
        let problem = "its tensors are not of this size";
        let bytes = BASE64_STANDARD.decode(text).map_err(|_| self.failed(problem))?;
        let values: Vec<_> = bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect();
        if values.len() == len { Ok(values) } else { Err(self.failed(problem)) }
    }
}

impl Contender for PeerCase {
    fn solve(&mut self, b: &mut Buffers) -> Result<Results> {
        let mut request = self.request.clone();
        request["op"] = "check".into();
        for (name, values) in [("q", &b.q), ("k", &b.k), ("v", &b.v), ("dout", &b.dout)] {
            if name != "k" || !self.tied {
                let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                request[name] = BASE64_STANDARD.encode(bytes).into();
            }
        }
        let solved: Solved = self.peer.borrow_mut().ask(request)?;
        let gradient = |text: Option<String>, like: &[f32]| match text {
            _ if !self.trains => Ok(None),
            Some(text) => self.tensor(&text, like.len()).map(Some),
            None => Err(self.failed("its answer lacks a gradient")),
        };
        Ok(Results {
            out: self.tensor(&solved.out, b.out.len())?,
            dq: gradient(solved.dq, &b.q)?,
            dk: if self.tied { None } else { gradient(solved.dk, &b.k)? },
            dv: gradient(solved.dv, &b.v)?,
        })
    }

    fn warm(&mut self, _: &mut Buffers, _: Option<&dyn MemoryProbe>) -> Result<[Option<u64>; 2]> {
        let opened: Opened = self.ask("open")?;
        self.id = Some(opened.id);
        Ok(opened.peak_bytes)
    }

    fn round(&mut self, _: &mut Buffers) -> Result<(f64, Option<f64>)> {
        let ran: Ran = self.peer.borrow_mut().ask(json!({"op": "run", "id": self.id}))?;
        let (forward, training) = ran.seconds;
        let possible = |seconds: f64| seconds.is_finite() && seconds > 0.0;
        if possible(forward) && training.is_none_or(possible) && training.is_some() == self.trains {
            return Ok(ran.seconds);
        }
        Err(self.failed(format!("its runs took {:?} seconds, which cannot be", ran.seconds)))
    }
}
