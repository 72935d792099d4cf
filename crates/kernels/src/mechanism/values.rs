//! Presets as four values, and four values as the preset that they are.

use super::{
    Activation, Bandwidth, Centering, Composed, Constant, Dense, DistanceKernel, Dot, DotExp, Factor, Fna, Frobenius,
    Gaussian, Infsa, InfsaResolvent, Inverse, InverseGradient, Landmarks, Laplacian, LaplacianExact, Limit, Mechanism,
    NewtonInit, Normalisation, Nystrom, OneHop, Pooled, PowerLaw, Resolvent, Row, Score, Series, Soft, Softmax, Ssa,
    Structure, Symmetric, Uniform, Unnormalised, Whitened, Whitening,
};

impl Mechanism {
    /// The four values of the mechanism.
    pub fn values(&self) -> Composed {
        let calls = |c: Composed| c.tied(self.tied()).causal(self.causal());
        calls(match self {
            Self::Softmax(m) => Composed::new(DotExp { scale: m.scale, softcap: None }),
            Self::Uniform(_) => Composed::new(Constant {}).structure(Pooled::default()),
            Self::Infsa(m) => infsa(m).series(OneHop { gamma: m.gamma }),
            Self::InfsaResolvent(m) => {
                infsa(&m.hop()).series(Resolvent { gamma: m.gamma, tol: m.tol, max_iter: m.max_iter })
            }
            Self::LinearInfsa(m) => {
                let super::LinearInfsa { iterations, operator, norm_bias, broadcast, eps, .. } = *m;
                let pooled = Pooled { iterations, operator, norm_bias, broadcast, eps };
                Composed::new((m.activation, m.scale)).structure(pooled).series(Limit { gamma: m.gamma })
            }
            Self::Soft(m) => soft(m).normalisation(Unnormalised::default()),
            // All tokens are no landmarks: degrees are theirs.
            Self::SoftPp(m) if m.landmarks == Landmarks::All => soft(m).normalisation(Symmetric::default()),
            Self::SoftPp(m) => soft(m).normalisation(Symmetric { degree: m.degree }),
            Self::Laplacian(m) => laplacian(&m.exact()).structure(m.nystrom()),
            Self::LaplacianExact(m) => laplacian(m),
            Self::Ssa(m) => Composed::new(DotExp { scale: m.scale, softcap: None }).structure(m.clone()),
            Self::Fna(m) => {
                let Fna { alpha, kappa, manifold, intrinsic_dim, norm_exponent, kernel, .. } = *m;
                let law = PowerLaw { alpha, kappa, manifold, intrinsic_dim };
                let score = if kernel == DistanceKernel::Levy { Score::Levy(law) } else { Score::Student(law) };
                Composed::new(score).normalisation(Row { density_exponent: norm_exponent })
            }
            Self::Composed(m) => (**m).clone(),
        })
    }
}

fn infsa(m: &Infsa) -> Composed {
    Composed::new((m.activation, m.scale)).normalisation(Frobenius { eps: m.eps })
}

fn soft(m: &Soft) -> Composed {
    let composed = Composed::new(Gaussian { scale: m.scale });
    if m.landmarks == Landmarks::All { composed } else { composed.structure(Nystrom::from(m.clone())) }
}

fn laplacian(m: &LaplacianExact) -> Composed {
    let composed = Composed::new(Bandwidth { lambda: m.lambda });
    match (m.centering, m.whitening, m.bias_one_over_n, m.weight_scale) {
        (Centering::None, Whitening::None, false, super::WeightScale::Unit) => {
            composed.normalisation(Unnormalised::default())
        }
        (Centering::None, Whitening::None, false, super::WeightScale::InvN) => {
            composed.normalisation(Unnormalised { factor: Factor::InvN })
        }
        _ => composed.normalisation(Whitened::from(m.clone())),
    }
}

impl Composed {
    /// The preset that these values are, where there is one: its fused path then serves them.
    pub(crate) fn preset(&self) -> Option<Mechanism> {
        let Self { score, structure, normalisation, series, tied, causal, .. } = self;
        let (tied, causal) = (*tied, *causal);
        if self.bias.is_some() || matches!(structure, Structure::Dense(Dense { window: Some(_), .. })) {
            return None;
        }
        let once = *series == Series::default();
        Some(match (score, structure, normalisation) {
            (Score::DotExp(DotExp { scale, softcap: None }), Structure::Dense(_), Normalisation::Row(row))
                if once && *row == Row::default() =>
            {
                Mechanism::Softmax(Softmax { scale: *scale, causal, tied })
            }
            (Score::DotExp(_), Structure::Clustered(_), _) => {
                Mechanism::Ssa(self.ssa().filter(|m| !m.routes_queries())?)
            }
            (Score::Constant(_), Structure::Dense(_), Normalisation::Row(row))
                if once && !tied && *row == Row::default() =>
            {
                Mechanism::Uniform(Uniform { causal })
            }
            (Score::Levy(_) | Score::Student(_), ..) => Mechanism::Fna(self.fna()?),
            (_, Structure::Dense(_), Normalisation::Frobenius(m)) => {
                let (activation, scale) = score.activation()?;
                self.infsa(Infsa { gamma: series.gamma(), activation, scale, eps: m.eps, tied, causal })?
            }
            (Score::Gaussian(Gaussian { scale }), Structure::Nystrom(m), _)
                if once && tied && m.newton_init.is_some() =>
            {
                degrees(Soft { scale: *scale, causal, ..m.soft() }, normalisation)?
            }
            (Score::Gaussian(Gaussian { scale }), Structure::Dense(_), _) if once && tied => {
                degrees(Soft { landmarks: Landmarks::All, scale: *scale, causal, ..Soft::default() }, normalisation)?
            }
            (Score::Laplacian(Bandwidth { lambda }), _, _) if once => {
                let exact = whitening(normalisation)?;
                let exact = LaplacianExact { lambda: *lambda, tied, causal, ..exact };
                match structure {
                    Structure::Dense(_) => Mechanism::LaplacianExact(exact),
                    Structure::Nystrom(m) => Mechanism::Laplacian(m.laplacian(exact)?),
                    _ => return None,
                }
            }
            _ => return None,
        })
    }

    /// The fields of [`Fna`], of values that are one hop over every pair, weighed by a power law of its distance, rows normalised.
    pub fn fna(&self) -> Option<Fna> {
        let Self { score, structure, normalisation, series, bias: None, tied, causal, .. } = self else { return None };
        let every_pair = matches!(structure, Structure::Dense(Dense { window: None, .. }));
        match (score, normalisation) {
            (Score::Levy(_) | Score::Student(_), Normalisation::Row(row))
                if every_pair && *series == Series::default() =>
            {
                let (tied, causal, norm_exponent) = (*tied, *causal, row.density_exponent);
                Some(Fna { tied, causal, norm_exponent, ..score.as_fna() })
            }
            _ => None,
        }
    }

    /// How tokens are clustered, of values that are softmax over a clustered graph.
    pub fn ssa(&self) -> Option<Ssa> {
        let Self { score, structure, normalisation, series, bias: None, tied: false, causal, .. } = self else {
            return None;
        };
        let softmax = *series == Series::default() && *normalisation == Normalisation::Row(Row::default());
        match (score, structure) {
            (Score::DotExp(DotExp { scale, softcap: None }), Structure::Clustered(m)) if softmax => {
                Some(m.ssa(*scale, *causal))
            }
            _ => None,
        }
    }

    /// One hop of InfSA, or all of them.
    fn infsa(&self, hop: Infsa) -> Option<Mechanism> {
        match &self.series {
            Series::OneHop(_) => Some(Mechanism::Infsa(hop)),
            Series::Resolvent(m) => {
                let Infsa { gamma, activation, scale, eps, tied, causal } = hop;
                let Resolvent { tol, max_iter, .. } = *m;
                Some(Mechanism::InfsaResolvent(InfsaResolvent {
                    gamma,
                    activation,
                    scale,
                    eps,
                    tied,
                    causal,
                    tol,
                    max_iter,
                }))
            }
            _ => None,
        }
    }
}

/// SOFT, or with degrees SOFT++.
fn degrees(m: Soft, normalisation: &Normalisation) -> Option<Mechanism> {
    match normalisation {
        Normalisation::None(n) if *n == Unnormalised::default() => Some(Mechanism::Soft(m)),
        Normalisation::Symmetric(n) => {
            Some(Mechanism::SoftPp(Soft { degree: Some(n.degree.unwrap_or_default()), ..m }))
        }
        _ => None,
    }
}

/// The fields of a whitened kernel, without those of its score and call.
fn whitening(normalisation: &Normalisation) -> Option<LaplacianExact> {
    let none = |weight_scale| LaplacianExact {
        centering: Centering::None,
        whitening: Whitening::None,
        bias_one_over_n: false,
        weight_scale,
        ..LaplacianExact::default()
    };
    match normalisation {
        Normalisation::Whitened(m) => Some(m.exact()),
        Normalisation::None(Unnormalised { factor: Factor::Unit }) => Some(none(super::WeightScale::Unit)),
        Normalisation::None(Unnormalised { factor: Factor::InvN }) => Some(none(super::WeightScale::InvN)),
        _ => None,
    }
}

impl Score {
    /// The activation of the scaled product, where InfSA has it.
    fn activation(&self) -> Option<(Activation, Option<f64>)> {
        match self {
            Self::DotRelu(Dot { scale }) => Some((Activation::Relu, *scale)),
            Self::DotAbs(Dot { scale }) => Some((Activation::Abs, *scale)),
            Self::DotGelu(Dot { scale }) => Some((Activation::Gelu, *scale)),
            _ => None,
        }
    }
}

impl Laplacian {
    /// The fields of its structure.
    fn nystrom(&self) -> Nystrom {
        let Self { landmarks, grid, inverse, newton_iterations, ridge, .. } = *self;
        let gradient = gradient_of(inverse);
        Nystrom {
            landmarks,
            grid,
            inverse,
            newton_iterations,
            newton_init: None,
            ridge,
            gradient,
            ..Nystrom::default()
        }
    }
}

/// How LaplacianFormer differentiates an inverse.
fn gradient_of(inverse: Inverse) -> InverseGradient {
    if inverse == Inverse::NewtonSchulz { InverseGradient::Unrolled } else { InverseGradient::Implicit }
}

impl Nystrom {
    /// The same as fields of [`Laplacian`], where it has them.
    fn laplacian(&self, exact: LaplacianExact) -> Option<Laplacian> {
        let Self { landmarks, grid, inverse, newton_iterations, newton_init, ridge, gradient, .. } = *self;
        let start: Option<NewtonInit> = if inverse == Inverse::NewtonSchulz { newton_init } else { None };
        let windows = matches!(landmarks, Landmarks::Pool(_) | Landmarks::Stride { .. });
        let plain = !self.landmark_act && self.value_conv == 0 && inverse != Inverse::Eigen;
        if !windows
            || !plain
            || start.is_some()
            || gradient != gradient_of(inverse)
            || exact.whitening == Whitening::Full
        {
            return None;
        }
        let LaplacianExact { lambda, centering, whitening, whiten_eps, weight_scale, bias_one_over_n, causal, tied } =
            exact;
        Some(Laplacian {
            lambda,
            landmarks,
            grid,
            inverse,
            newton_iterations,
            ridge,
            centering,
            whitening,
            whiten_eps,
            weight_scale,
            bias_one_over_n,
            causal,
            tied,
        })
    }
}
