//! One contender at one size: its runs, and what they come to.

use std::time::{Duration, Instant};

use resolvent_kernels::{self as kernels, Mechanism, Plan, Precision, Shape, Strategy};

use super::{
    BenchReport, Ceilings, PlanSummary, Point, Timing, Work,
    contender::{Buffers, Contender, Ours},
    rivals::{Rival, Rivals},
};
use crate::{Result, candidate::Candidate, memory::MemoryProbe, stats::median};

/// A case, or the point that says why there is none.
type Planned = std::result::Result<Case, Box<Point>>;

/// One mechanism, computed by us or by a rival, at one size.
pub(super) struct Case {
    contender: Box<dyn Contender>,
    point: Point,
    tied: bool,
    work: [Work; 2],
    forward: Vec<f64>,
    training: Vec<f64>,
    peaks: [Option<u64>; 2],
}

impl Case {
    /// One of our operators; refused sizes are points that say why.
    pub fn ours(Candidate { name, mechanism }: &Candidate, shape: Shape, precision: Precision) -> Planned {
        let mut point = Point::new(name, Some(mechanism.clone()), shape);
        match Ours::new(mechanism, shape, precision) {
            Ok(ours) => {
                let plan = *ours.plan();
                point.plan = Some(PlanSummary::of(&plan));
                Ok(Self::new(Box::new(ours), point, mechanism, &plan, Work::of(&plan)))
            }
            Err(why) => Err(Box::new(Point { skipped: Some(why.to_string()), ..point })),
        }
    }

    /// A rival's way to the result of a mechanism.
    pub fn rival(rivals: &Rivals, rival: &Rival, of: &Candidate, shape: Shape) -> Planned {
        let mechanism = &of.mechanism;
        let point = Point { rival_of: Some(of.name.clone()), ..Point::new(&rival.label, None, shape) };
        match kernels::plan(mechanism, &shape, false, Strategy::Auto) {
            // The least operations; its bytes are its own affair.
            Ok(plan) => {
                let work = Work::of(&plan).map(|work| Work { bytes: 0, ..work });
                Ok(Self::new(rivals.contender(rival, mechanism, shape), point, mechanism, &plan, work))
            }
            Err(why) => Err(Box::new(Point { skipped: Some(why.to_string()), ..point })),
        }
    }

    fn new(
        contender: Box<dyn Contender>,
        mut point: Point,
        mechanism: &Mechanism,
        plan: &Plan,
        work: [Work; 2],
    ) -> Self {
        point.flops = [plan.flops_forward, plan.flops_backward];
        // Of a time that may have been less work, no rate is known.
        let work = if mechanism.iterates() { work.map(|work| Work { flops: 0, ..work }) } else { work };
        let (forward, training, peaks) = (Vec::new(), Vec::new(), [None; 2]);
        Self { contender, point, tied: mechanism.tied(), work, forward, training, peaks }
    }

    pub fn is_rival(&self) -> bool {
        self.point.rival_of.is_some()
    }

    /// Bytes that it is known to hold at its peak beside the tensors, in this process.
    pub fn needs(&self) -> u64 {
        self.contender.needs(Shape::square(self.point.batch, self.point.heads, self.point.tokens, self.point.head_dim))
    }

    pub fn skipped(self, why: String) -> Point {
        Point { skipped: Some(why), ..self.point }
    }

    /// Seconds of a forward and a forward and backward pass: scaled from a smaller size, or from the machine's rate.
    pub fn predicted_seconds(&self, report: &BenchReport) -> f64 {
        let work = |flops: [u64; 2]| (2 * flops[0] + flops[1]) as f64;
        let smaller = report.points.iter().rev().find(|p| p.label == self.point.label && p.forward.is_some());
        match smaller {
            Some(Point { forward: Some(forward), training: Some(training), flops, .. }) => {
                (forward.median + training.median) * work(self.point.flops) / work(*flops).max(1.0)
            }
            _ => work(self.point.flops) / (0.2e9 * report.ceilings.gemm_gflops),
        }
    }

    /// A first forward and a first backward pass, which touch all memory; what they hold is counted.
    pub fn warm(&mut self, buffers: &mut Buffers, probe: Option<&dyn MemoryProbe>) -> Result<()> {
        self.peaks = self.contender.warm(buffers, probe)?;
        if self.is_rival() {
            // Ours write their results to memory that is there; those of the others are among what they hold.
            let Point { batch, heads, tokens, head_dim, .. } = self.point;
            let tensor = (size_of::<f32>() * batch * heads * tokens * head_dim) as u64;
            let results = [1, if self.tied { 3 } else { 4 }].map(|tensors| tensors * tensor);
            for (peak, results) in self.peaks.iter_mut().zip(results) {
                *peak = peak.map(|peak| peak.saturating_sub(results));
            }
        }
        Ok(())
    }

    /// A turn: forward passes, and forward and backward passes, until it has lasted `turn`, at least one of each. The medians of
    /// the later half of them count: what the one before left running or in the caches is gone by then.
    pub fn turn(&mut self, buffers: &mut Buffers, turn: Duration) -> Result<()> {
        let (start, mut runs) = (Instant::now(), Vec::new());
        while runs.is_empty() || start.elapsed() < turn {
            runs.push(self.contender.round(buffers)?);
        }
        let late = &runs[runs.len() / 2..];
        let typical = |pass: usize| median(&mut late.iter().map(|run| run[pass]).collect::<Vec<_>>());
        self.forward.push(typical(0));
        self.training.push(typical(1));
        Ok(())
    }

    /// What was measured.
    pub fn finish(mut self, ceilings: &Ceilings) -> Point {
        let tokens = self.point.batch * self.point.tokens;
        let [forward, backward] = self.work;
        let timing = |times: &mut Vec<f64>, work, peak| Timing::of(times, tokens, work, peak, ceilings);
        self.point.forward = Some(timing(&mut self.forward, forward, self.peaks[0]));
        self.point.training = Some(timing(&mut self.training, forward + backward, self.peaks[1]));
        self.point
    }
}
