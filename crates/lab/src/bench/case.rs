//! One contender at one size: its runs, and what they come to.

use std::time::{Duration, Instant};

use resolvent_kernels::{Mechanism, Plan, Precision};

use super::{
    BenchReport, Ceilings, PlanSummary, Point, TensorType, Timing, Work,
    buffers::Buffers,
    call::Call,
    contender::Contender,
    ours::{self, Ours},
    rivals::{Rival, Rivals},
};
use crate::{Result, candidate::Candidate, memory::MemoryProbe, stats::median};

/// A case, or the point that says why there is none.
type Planned = std::result::Result<Case, Box<Point>>;

/// One mechanism, computed by us or by a rival, at one size.
pub(super) struct Case {
    contender: Box<dyn Contender>,
    point: Point,
    call: Call,
    tied: bool,
    work: [Work; 2],
    forward: Vec<f64>,
    training: Vec<f64>,
    peaks: [Option<u64>; 2],
}

impl Case {
    /// One of our operators; refused sizes are points that say why.
    pub fn ours(Candidate { name, mechanism }: &Candidate, call: &Call, precision: Precision) -> Planned {
        let mut point = Point::new(name, Some(mechanism.clone()), call.shape);
        match Ours::new(mechanism, call, precision) {
            Ok(ours) => {
                let plan = *ours.plan();
                point.plan = Some(PlanSummary::of(&plan));
                Ok(Self::new(Box::new(ours), point, call, mechanism, &plan, Work::of(&plan)))
            }
            Err(why) => Err(Box::new(Point { skipped: Some(why.to_string()), ..point })),
        }
    }

    /// A rival's way to the result of a mechanism.
    pub fn rival(rivals: &Rivals, rival: &Rival, of: &Candidate, call: &Call) -> Planned {
        let mechanism = &of.mechanism;
        let point = Point::new(&rival.label, None, call.shape);
        let point = Point { rival_of: Some(of.name.clone()), dtype: Some(rival.dtype), ..point };
        let planned =
            ours::plan(mechanism, call).and_then(|plan| Ok((plan, rivals.contender(rival, mechanism, call)?)));
        match planned {
            // The least operations; its bytes are its own affair.
            Ok((plan, contender)) => {
                let work = Work::of(&plan).map(|work| Work { bytes: 0, ..work });
                Ok(Self::new(contender, point, call, mechanism, &plan, work))
            }
            Err(why) => Err(Box::new(Point { skipped: Some(why.to_string()), ..point })),
        }
    }

    fn new(
        contender: Box<dyn Contender>,
        mut point: Point,
        call: &Call,
        mechanism: &Mechanism,
        plan: &Plan,
        work: [Work; 2],
    ) -> Self {
        point.flops = [plan.flops_forward, plan.flops_backward];
        // Of a time that may have been less work, no rate is known.
        let work = if mechanism.iterates() { work.map(|work| Work { flops: 0, ..work }) } else { work };
        let (forward, training, peaks) = (Vec::new(), Vec::new(), [None; 2]);
        Self { contender, point, call: call.clone(), tied: mechanism.tied, work, forward, training, peaks }
    }

    pub fn call(&self) -> &Call {
        &self.call
    }

    pub fn is_rival(&self) -> bool {
        self.point.rival_of.is_some()
    }

    /// Bytes that it is known to hold at its peak beside the tensors, in this process.
    pub fn needs(&self) -> u64 {
        self.contender.needs(self.call.shape)
    }

    pub fn skipped(self, why: String) -> Point {
        Point { skipped: Some(why), ..self.point }
    }

    /// Seconds of a forward and a forward and backward pass: scaled from a smaller size, or from the machine's rate.
    pub fn predicted_seconds(&self, report: &BenchReport) -> f64 {
        let work = |flops: [u64; 2], trains: bool| (flops[0] + if trains { flops[0] + flops[1] } else { 0 }) as f64;
        let smaller = report.points.iter().rev().find(|p| p.label == self.point.label && p.forward.is_some());
        match smaller {
            Some(Point { forward: Some(forward), training, flops, .. }) => {
                let seconds = forward.median + training.as_ref().map_or(0.0, |training| training.median);
                let trains = training.is_some();
                seconds * work(self.point.flops, trains) / work(*flops, trains).max(1.0)
            }
            _ => work(self.point.flops, true) / (0.2e9 * report.ceilings.gemm_gflops),
        }
    }

    /// A first forward and a first backward pass, which touch all memory; what they hold is counted.
    pub fn warm(&mut self, buffers: &mut [Buffers], probe: Option<&dyn MemoryProbe>) -> Result<()> {
        let own = self.own(buffers);
        self.peaks = self.contender.warm(own, probe)?;
        if self.is_rival() {
            // Ours write their results to memory that is there; those of the others are among what they hold.
            let results = self.bytes_of_results();
            for (peak, results) in self.peaks.iter_mut().zip(results) {
                *peak = peak.map(|peak| peak.saturating_sub(results));
            }
        }
        Ok(())
    }

    /// The tensors that lie as those of its call.
    fn own<'a>(&self, buffers: &'a mut [Buffers]) -> &'a mut Buffers {
        let own = buffers.iter_mut().find(|buffers| buffers.call.lies_as(&self.call));
        own.expect("there are buffers for every arrangement")
    }

    /// Bytes of the output, and of the output and the gradients.
    fn bytes_of_results(&self) -> [u64; 2] {
        let [q, kv] = [self.call.shape.heads, self.call.kv_heads].map(|heads| self.call.len(heads) as u64);
        let gradients = q + if self.tied { kv } else { 2 * kv };
        [q, q + gradients].map(|elements| self.point.dtype.map_or(4, TensorType::bytes) * elements)
    }

    /// A turn: forward passes, and forward and backward passes, until it has lasted `turn`, at least one of each. The medians of
    /// the later half of them count: what the one before left running or in the caches is gone by then.
    pub fn turn(&mut self, buffers: &mut [Buffers], turn: Duration) -> Result<()> {
        let buffers = self.own(buffers);
        let (start, mut runs) = (Instant::now(), Vec::new());
        while runs.is_empty() || start.elapsed() < turn {
            runs.push(self.contender.round(buffers)?);
        }
        let late = &runs[runs.len() / 2..];
        let typical = |mut times: Vec<f64>| (!times.is_empty()).then(|| median(&mut times));
        self.forward.extend(typical(late.iter().map(|run| run.0).collect()));
        self.training.extend(typical(late.iter().filter_map(|run| run.1).collect()));
        Ok(())
    }

    /// What was measured.
    pub fn finish(mut self, ceilings: &Ceilings) -> Point {
        let tokens = self.point.batch * self.point.tokens;
        let [forward, backward] = self.work;
        // Of what has no backward pass there are no times with one.
        let timing = |times: &mut Vec<f64>, work, peak| {
            (!times.is_empty()).then(|| Timing::of(times, tokens, work, peak, ceilings))
        };
        self.point.forward = timing(&mut self.forward, forward, self.peaks[0]);
        self.point.training = timing(&mut self.training, forward + backward, self.peaks[1]);
        self.point
    }
}
