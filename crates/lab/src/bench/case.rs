//! One contender at one size: its runs, and what they come to.

use resolvent_kernels::{self as kernels, Mechanism, Plan, Shape, Strategy};

use super::{
    BenchReport, Ceilings, PlanSummary, Point, Timing,
    contender::{Buffers, Contender, Ours},
    rivals::{Rival, Rivals},
};
use crate::{Result, compare::MemoryProbe};

/// A case, or the point that says why there is none.
type Planned = std::result::Result<Case, Box<Point>>;

/// One mechanism, computed by us or by a rival, at one size.
pub(super) struct Case {
    contender: Box<dyn Contender>,
    point: Point,
    flops: [u64; 2],
    bytes: [u64; 2],
    forward: Vec<f64>,
    training: Vec<f64>,
    peaks: [Option<u64>; 2],
}

impl Case {
    /// One of our operators; refused sizes are points that say why.
    pub fn ours(mechanism: &Mechanism, shape: Shape) -> Planned {
        let mut point = Point::new(mechanism.id(), Some(mechanism.clone()), shape);
        match Ours::new(mechanism, shape) {
            Ok(ours) => {
                let plan = *ours.plan();
                point.plan = Some(PlanSummary::of(&plan));
                Ok(Self::new(Box::new(ours), point, &plan, [plan.bytes_forward, plan.bytes_backward]))
            }
            Err(why) => Err(Box::new(Point { skipped: Some(why.to_string()), ..point })),
        }
    }

    /// A rival's way to the result of `mechanism`.
    pub fn rival(rivals: &Rivals, rival: &Rival, mechanism: &Mechanism, shape: Shape) -> Planned {
        let point = Point { rival_of: Some(mechanism.id().into()), ..Point::new(&rival.label, None, shape) };
        match kernels::plan(mechanism, &shape, false, Strategy::Auto) {
            // The least operations; its bytes are its own affair.
            Ok(plan) => Ok(Self::new(rivals.contender(rival, mechanism, shape), point, &plan, [0, 0])),
            Err(why) => Err(Box::new(Point { skipped: Some(why.to_string()), ..point })),
        }
    }

    fn new(contender: Box<dyn Contender>, point: Point, plan: &Plan, bytes: [u64; 2]) -> Self {
        let flops = [plan.flops_forward, plan.flops_backward];
        Self { contender, point, flops, bytes, forward: Vec::new(), training: Vec::new(), peaks: [None; 2] }
    }

    pub fn is_rival(&self) -> bool {
        self.point.rival_of.is_some()
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
                (forward.median + training.median) * work(self.flops) / work(*flops).max(1.0)
            }
            _ => work(self.flops) / (0.2e9 * report.ceilings.gemm_gflops),
        }
    }

    /// A first forward and a first backward pass, which touch all memory; what they hold is counted.
    pub fn warm(&mut self, buffers: &mut Buffers, probe: Option<&dyn MemoryProbe>) -> Result<()> {
        self.peaks = self.contender.warm(buffers, probe)?;
        Ok(())
    }

    /// One timed forward pass, and one forward and backward pass.
    pub fn round(&mut self, buffers: &mut Buffers) -> Result<()> {
        let [forward, training] = self.contender.round(buffers)?;
        self.forward.push(forward);
        self.training.push(training);
        Ok(())
    }

    /// What was measured.
    pub fn finish(mut self, ceilings: &Ceilings) -> Point {
        let tokens = self.point.batch * self.point.tokens;
        let [forward, backward] = self.flops;
        let bytes = [self.bytes[0], self.bytes[0] + self.bytes[1]];
        let timing = |times: &mut Vec<f64>, flops: u64, bytes: u64, peak| {
            Timing::of(times, tokens, flops, bytes, peak, ceilings)
        };
        self.point.forward = Some(timing(&mut self.forward, forward, bytes[0], self.peaks[0]));
        self.point.training = Some(timing(&mut self.training, forward + backward, bytes[1], self.peaks[1]));
        self.point.flops = self.flops;
        self.point
    }
}
