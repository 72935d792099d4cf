//! A mechanism as the kernels know it: a preset with fields of its own, or a composition; and either as the other.

use super::{
    Activation, Bandwidth, Centering, Constant, Dense, DistanceKernel, Dot, DotExp, Factor, Fna, Frobenius, Gaussian,
    Infsa, InfsaResolvent, Inverse, InverseGradient, Landmarks, Laplacian, LaplacianExact, Limit, LinearInfsa,
    Mechanism, Normalisation, Nystrom, OneHop, Pooled, PowerLaw, Resolvent, Row, Score, Series, Soft, Softmax, Ssa,
    Structure, Symmetric, Uniform, Unnormalised, Whitened, Whitening, named,
};
use crate::Parameter;

/// What carries out a call: the streams of a preset, which know it by its own fields, or those of compositions, which know any four values.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Form {
    Softmax(Softmax),
    Uniform(Uniform),
    Infsa(Infsa),
    InfsaResolvent(InfsaResolvent),
    LinearInfsa(LinearInfsa),
    Soft(Soft),
    SoftPp(Soft),
    Laplacian(Laplacian),
    LaplacianExact(LaplacianExact),
    Ssa(Ssa),
    Fna(Fna),
    Composed(Box<Mechanism>),
}

impl Form {
    /// The preset of an id, with its defaults; none for an id of others.
    pub(super) fn preset(id: &str) -> Option<Self> {
        Some(match id {
            "softmax" => Self::Softmax(Softmax::default()),
            "uniform" => Self::Uniform(Uniform::default()),
            "infsa" => Self::Infsa(Infsa::default()),
            "infsa-resolvent" => Self::InfsaResolvent(InfsaResolvent::default()),
            "linear-infsa" => Self::LinearInfsa(LinearInfsa::default()),
            "soft" => Self::Soft(Soft::default()),
            "soft-pp" => Self::SoftPp(Soft::plus()),
            "laplacian" => Self::Laplacian(Laplacian::default()),
            "laplacian-exact" => Self::LaplacianExact(LaplacianExact::default()),
            "ssa" => Self::Ssa(Ssa::default()),
            "fna" => Self::Fna(Fna::default()),
            _ => return None,
        })
    }

    /// The preset's id.
    pub const fn id(&self) -> &'static str {
        match self {
            Self::Softmax(_) => "softmax",
            Self::Uniform(_) => "uniform",
            Self::Infsa(_) => "infsa",
            Self::InfsaResolvent(_) => "infsa-resolvent",
            Self::LinearInfsa(_) => "linear-infsa",
            Self::Soft(_) => "soft",
            Self::SoftPp(_) => "soft-pp",
            Self::Laplacian(_) => "laplacian",
            Self::LaplacianExact(_) => "laplacian-exact",
            Self::Ssa(_) => "ssa",
            Self::Fna(_) => "fna",
            Self::Composed(_) => Mechanism::COMPOSED,
        }
    }

    /// The parameters of a preset, which are fewer than those of its values.
    pub const fn parameters(&self) -> &'static [Parameter] {
        match self {
            Self::Softmax(_) | Self::Uniform(_) | Self::Ssa(_) | Self::Composed(_) => &[],
            Self::Infsa(_) | Self::InfsaResolvent(_) | Self::LinearInfsa(_) => &[Parameter::Gamma],
            // At alpha = 2 the kernel jumps: there is no slope in alpha.
            Self::Fna(m) if m.is_gaussian() => &[Parameter::Kappa],
            Self::Fna(_) => &[Parameter::Alpha, Parameter::Kappa],
            Self::Soft(m) | Self::SoftPp(m) => m.parameters(),
            Self::Laplacian(m) => m.parameters(),
            Self::LaplacianExact(_) => &[Parameter::Lambda],
        }
    }
}

impl From<Form> for Mechanism {
    fn from(form: Form) -> Self {
        let name = Some(form.id());
        let called = |m: Self, tied, causal| Self { tied, causal, name, ..m };
        match form {
            Form::Softmax(m) => called(Self::new(DotExp { scale: m.scale, softcap: None }), m.tied, m.causal),
            Form::Uniform(m) => called(Self::new(Constant {}).structure(Pooled::default()), false, m.causal),
            Form::Infsa(m) => called(infsa(&m).series(OneHop { gamma: m.gamma }), m.tied, m.causal),
            Form::InfsaResolvent(m) => {
                let series = Resolvent { gamma: m.gamma, tol: m.tol, max_iter: m.max_iter };
                called(infsa(&m.hop()).series(series), m.tied, m.causal)
            }
            Form::LinearInfsa(m) => {
                let LinearInfsa { iterations, operator, norm_bias, broadcast, eps, .. } = m;
                let pooled = Pooled { iterations, operator, norm_bias, broadcast, eps };
                let weights = Self::new((m.activation, m.scale)).structure(pooled);
                called(weights.series(Limit { gamma: m.gamma }), m.tied, m.causal)
            }
            Form::Soft(m) => called(soft(&m).normalisation(Unnormalised::default()), true, m.causal),
            Form::SoftPp(m) => called(soft(&m).normalisation(Symmetric { degree: m.degree }), true, m.causal),
            Form::Laplacian(m) => called(laplacian(&m.exact()).structure(m.nystrom()), m.tied, m.causal),
            Form::LaplacianExact(m) => called(laplacian(&m), m.tied, m.causal),
            Form::Ssa(m) => {
                let (scale, causal) = (m.scale, m.causal);
                called(Self::new(DotExp { scale, softcap: None }).structure(m), false, causal)
            }
            Form::Fna(m) => {
                let Fna { alpha, kappa, manifold, intrinsic_dim, norm_exponent, kernel, .. } = m;
                let law = PowerLaw { alpha, kappa, manifold, intrinsic_dim };
                let score = if kernel == DistanceKernel::Levy { Score::Levy(law) } else { Score::Student(law) };
                called(Self::new(score).normalisation(Row { density_exponent: norm_exponent }), m.tied, m.causal)
            }
            Form::Composed(m) => *m,
        }
    }
}

fn infsa(m: &Infsa) -> Mechanism {
    Mechanism::new((m.activation, m.scale)).normalisation(Frobenius { eps: m.eps })
}

fn soft(m: &Soft) -> Mechanism {
    Mechanism::new(Gaussian { scale: m.scale }).structure(Nystrom::from(m.clone()))
}

fn laplacian(m: &LaplacianExact) -> Mechanism {
    let kernel = Mechanism::new(Bandwidth { lambda: m.lambda });
    match (m.centering, m.whitening, m.bias_one_over_n, m.weight_scale) {
        (Centering::None, Whitening::None, false, super::WeightScale::Unit) => {
            kernel.normalisation(Unnormalised::default())
        }
        (Centering::None, Whitening::None, false, super::WeightScale::InvN) => {
            kernel.normalisation(Unnormalised { factor: Factor::InvN })
        }
        _ => kernel.normalisation(Whitened::from(m.clone())),
    }
}

impl PartialEq for Mechanism {
    /// The same values under the same id.
    fn eq(&self, other: &Self) -> bool {
        self.has_values_of(other) && self.id() == other.id()
    }
}

impl Mechanism {
    /// The preset that it was made as, where that has fields of its own and these say all that the values do: whoever has changed a value by
    /// hand to one that the preset has no field for has made a composition.
    pub(crate) fn own(&self) -> Option<Form> {
        let name = self.name.filter(|name| named::has_fields(name))?;
        let form = self.as_preset().filter(|form| form.id() == name)?;
        let again = Self::from(form.clone());
        // What is no number differs from itself, and is the preset's to refuse.
        (self.has_values_of(&again) || format!("{self:?}") == format!("{again:?}")).then_some(form)
    }

    /// Whether all values are the same, whatever they were made as.
    fn has_values_of(&self, other: &Self) -> bool {
        let called = |m: &Self| (m.bias, m.tied, m.causal);
        self.score == other.score
            && self.structure == other.structure
            && self.normalisation == other.normalisation
            && self.series == other.series
            && called(self) == called(other)
    }

    /// What carries it out.
    pub(crate) fn form(&self) -> Form {
        self.own().unwrap_or_else(|| Form::Composed(Box::new(self.clone().composed())))
    }

    /// The four values without the name of a preset; what filters the values beside the operator is left out where all tokens are landmarks.
    #[must_use]
    pub fn values(&self) -> Self {
        Self { name: None, ..self.clone() }.over_all_tokens()
    }

    /// The same as a composition, whatever preset with fields of its own it was.
    pub(super) fn composed(self) -> Self {
        match self.name {
            Some(name) if named::has_fields(name) => {
                let composed = Self { name: None, ..self };
                if composed.value_conv() == 0 { composed.over_all_tokens() } else { composed }
            }
            _ => self,
        }
    }

    /// All tokens are no landmarks: the structure is dense then, and degrees are theirs.
    fn over_all_tokens(mut self) -> Self {
        if matches!(&self.structure, Structure::Nystrom(m) if m.landmarks == Landmarks::All) {
            self.structure = Structure::default();
            if let Normalisation::Symmetric(degrees) = &mut self.normalisation {
                *degrees = Symmetric::default();
            }
        }
        self
    }

    /// The same preset, or a composition where the values are none that it can have.
    pub(super) fn settled(self) -> Self {
        if self.own().is_some() { self } else { self.composed() }
    }

    /// The preset with fields of its own that these values are, where there is one: its streams then serve them, unless a check says that it
    /// is not valid.
    pub(crate) fn as_preset(&self) -> Option<Form> {
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
                Form::Softmax(Softmax { scale: *scale, causal, tied })
            }
            (Score::DotExp(_), Structure::Clustered(_), _) => Form::Ssa(self.as_ssa()?),
            (Score::Constant(_), Structure::Dense(_) | Structure::Pooled(_), Normalisation::Row(row))
                if once && !tied && *row == Row::default() =>
            {
                Form::Uniform(Uniform { causal })
            }
            (_, Structure::Pooled(m), Normalisation::Row(_)) => Form::LinearInfsa(self.as_linear_infsa(m)?),
            (Score::Levy(_) | Score::Student(_), ..) => Form::Fna(self.as_fna()?),
            (_, Structure::Dense(_), Normalisation::Frobenius(m)) => {
                let (activation, scale) = score.activation()?;
                self.series_of(Infsa { gamma: series.gamma(), activation, scale, eps: m.eps, tied, causal })?
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
                    Structure::Dense(_) => Form::LaplacianExact(exact),
                    // Its filters are by channel, and those of a composition are not.
                    Structure::Nystrom(m)
                        if self.name != Some("laplacian") && matches!(m.landmarks, Landmarks::Conv { .. }) =>
                    {
                        return None;
                    }
                    Structure::Nystrom(m) => Form::Laplacian(m.laplacian(exact)?),
                    _ => return None,
                }
            }
            _ => return None,
        })
    }

    /// The fields of [`Fna`], whatever it was made as, of values that are one hop over every pair, weighed by a power law of its distance, rows normalised.
    pub fn as_fna(&self) -> Option<Fna> {
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

    /// The fields of [`Soft`], of what was made as `soft` or `soft-pp`.
    pub fn as_soft(&self) -> Option<Soft> {
        if let Some(Form::Soft(m) | Form::SoftPp(m)) = self.own() { Some(m) } else { None }
    }

    /// How tokens are clustered, whatever it was made as, of values that are softmax over a clustered graph.
    pub fn as_ssa(&self) -> Option<Ssa> {
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

    /// The fields of [`LinearInfsa`], of the limit of pooled weights.
    fn as_linear_infsa(&self, pooled: &Pooled) -> Option<LinearInfsa> {
        let Series::Limit(Limit { gamma }) = self.series else { return None };
        let (activation, scale) = self.score.activation()?;
        let Pooled { iterations, operator, norm_bias, broadcast, eps } = *pooled;
        let (tied, causal) = (self.tied, self.causal);
        Some(LinearInfsa { gamma, activation, scale, eps, tied, causal, iterations, operator, norm_bias, broadcast })
    }

    /// One hop of InfSA, or all of them.
    fn series_of(&self, hop: Infsa) -> Option<Form> {
        match &self.series {
            Series::OneHop(_) => Some(Form::Infsa(hop)),
            Series::Resolvent(m) => {
                let Infsa { gamma, activation, scale, eps, tied, causal } = hop;
                let Resolvent { tol, max_iter, .. } = *m;
                let all = InfsaResolvent { gamma, activation, scale, eps, tied, causal, tol, max_iter };
                Some(Form::InfsaResolvent(all))
            }
            _ => None,
        }
    }
}

/// SOFT, or with degrees SOFT++.
fn degrees(m: Soft, normalisation: &Normalisation) -> Option<Form> {
    match normalisation {
        Normalisation::None(n) if *n == Unnormalised::default() => Some(Form::Soft(m)),
        Normalisation::Symmetric(n) => Some(Form::SoftPp(Soft { degree: Some(n.degree.unwrap_or_default()), ..m })),
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
        let starts = inverse == Inverse::NewtonSchulz && newton_init.is_some();
        let plain = !self.landmark_act && self.value_conv == 0;
        if !plain || starts || gradient != gradient_of(inverse) {
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
