//! Ranges of the parameters, and what they cannot be combined with.

use super::{CausalClusters, ClusterOn, Estimator, Pairs, Sampler, Ssa};
use crate::{
    Error, Result, Shape,
    mechanism::valid::{check, check_scale},
};

/// Most channels of a random projection: far beyond those of any head, and a matrix that any machine holds.
const MAX_JL_DIM: usize = 4096;
/// More than any call can use of what a count bounds from above.
const MAX_COUNT: usize = 1 << 31;
/// So many edges may be drawn with replacement where tokens are fewer too.
const FEW_SAMPLES: usize = 1 << 14;
/// Lloyd's algorithm has long come to rest.
const MAX_ROUNDS: usize = 1_000_000;

impl Ssa {
    pub(in crate::mechanism) fn validate(&self) -> Result<()> {
        let count = |field, got: Option<usize>, expected| {
            let got = got.unwrap_or(1);
            check(field, got, (1..=MAX_COUNT).contains(&got), expected)
        };
        count("clusters", self.clusters, "null or 1 to 2147483648")?;
        let pairs = if let Pairs::Count(pairs) = self.pairs { pairs } else { 1 };
        count("pairs", Some(pairs), "\"all\" or 1 to 2147483648")?;
        let jl_dim = self.jl_dim.unwrap_or(1);
        check("jl_dim", jl_dim, (1..=MAX_JL_DIM).contains(&jl_dim), "null or in [1, 4096]")?;
        let rounds = self.kmeans_iterations;
        check("kmeans_iterations", rounds, rounds <= MAX_ROUNDS, "at most 1000000")?;
        count("routes", Some(self.routes), "1 to 2147483648")?;
        count("causal_clusters.size", Some(self.causal_clusters.size()), "1 to 2147483648")?;
        for (field, outliers) in [("outlier_globals", self.outlier_globals), ("outlier_queries", self.outlier_queries)]
        {
            check(field, outliers, outliers <= MAX_COUNT, "at most 2147483648")?;
        }
        let balance = self.balance.unwrap_or(1.0);
        check("balance", balance, (1.0..=1e6).contains(&balance), "null or in [1, 1e6]")?;
        check_scale(self.scale)?;
        self.check_choices(self.causal)
    }

    /// Whether the choices go together, causality being OR-ed with the configuration's.
    fn check_choices(&self, causal: bool) -> Result<()> {
        let row = self.sampler(causal) == Sampler::Row;
        if self.estimator == Estimator::Centroid && self.samples.is_some_and(|samples| samples > 0) {
            return unsupported(
                "samples > 0 with estimator = centroid",
                "mean tokens stand for all edges; leave samples out",
            );
        }
        if row && self.pairs != Pairs::All {
            return unsupported(
                "pairs with sampler = row",
                "every row draws from all clusters; leave pairs out or take another sampler",
            );
        }
        if self.routes_queries() {
            return self.check_routed(causal);
        }
        if matches!(self.causal_clusters, CausalClusters::Segment { .. }) {
            return unsupported(
                "causal_clusters = segment",
                "only queries that choose for themselves take it; use prefix, or the mechanism `routed`",
            );
        }
        if !causal {
            return Ok(());
        }
        if !self.shared() {
            return unsupported(
                "causal with cluster_on = dual",
                "one label per token is needed; cluster on queries or keys",
            );
        }
        if self.routes != 1 {
            return unsupported("causal with routes > 1", "routes would be chosen by later tokens; set routes to 1");
        }
        if self.outlier_globals > 0 || self.outlier_queries > 0 {
            return unsupported(
                "causal with outlier_globals or outlier_queries",
                "outliers would be chosen by later tokens; set both to 0",
            );
        }
        if self.estimator != Estimator::Centroid && self.samples != Some(0) && !row {
            return unsupported(
                "causal with a sampler of cluster pairs",
                "pairs would be sampled by later tokens; set sampler to row",
            );
        }
        Ok(())
    }

    /// What queries that choose for themselves leave to choose.
    fn check_routed(&self, causal: bool) -> Result<()> {
        let sampled = self.estimator != Estimator::Centroid && self.samples != Some(0);
        let of_pairs = self.pairs != Pairs::All || self.sampler.is_some();
        let blocks = matches!(self.causal_clusters, CausalClusters::Block { .. });
        let segments = matches!(self.causal_clusters, CausalClusters::Segment { .. });
        let choices = [
            (
                causal && !segments && !blocks,
                "causal with route_by = query and causal_clusters = prefix",
                r#"clusters would be made of later keys; set causal_clusters to {"kind": "segment", "size": 256}"#,
            ),
            (
                causal && self.outlier_globals > 0,
                "causal with outlier_globals",
                "outliers would be chosen by later tokens; leave it out, or name global_tokens",
            ),
            (
                self.cluster_on != ClusterOn::Keys,
                "cluster_on other than keys with route_by = query",
                "keys alone are clustered; set cluster_on to keys",
            ),
            (
                self.outlier_queries > 0,
                "outlier_queries with route_by = query",
                "every query chooses for itself; leave outlier_queries out",
            ),
            (
                sampled,
                "sampled edges with route_by = query",
                "edges are sampled between clusters of queries and of keys; set estimator to centroid, or samples to 0",
            ),
            (of_pairs, "pairs or sampler with route_by = query", "no edges are sampled; leave both out"),
            (blocks, "causal_clusters = block with route_by = query", "tokens would see later ones; use segment"),
        ];
        match choices.into_iter().find(|(wrong, ..)| *wrong) {
            Some((_, what, why)) => Err(Error::Unsupported { mechanism: "routed", what, why }),
            None => Ok(()),
        }
    }

    pub(in crate::mechanism) fn check_support(&self, shape: &Shape, causal: bool) -> Result<()> {
        self.check_choices(causal)?;
        let (samples, most) = (self.samples.unwrap_or(0), shape.seq_kv.max(FEW_SAMPLES));
        check("samples", samples, samples <= most, "null or at most the number of keys, or 16384 for fewer")?;
        if let Some(&index) = self.globals(shape.seq_kv).iter().find(|&&index| index >= shape.seq_kv) {
            let expected = "a list of positions below seq_kv";
            return Err(Error::OutOfRange { field: "global_tokens", got: index.to_string(), expected });
        }
        if self.routes_queries() {
            let wrong = causal && shape.seq_q > shape.seq_kv;
            let error = Error::Unsupported {
                mechanism: "routed",
                what: "causal with seq_q > seq_kv",
                why: "the first queries would see no key",
            };
            return if wrong { Err(error) } else { Ok(()) };
        }
        if shape.seq_q == shape.seq_kv {
            return Ok(());
        }
        if causal {
            return unsupported(
                "causal with seq_q != seq_kv",
                "labels follow the whole sequence; pass all of its queries",
            );
        }
        if self.shared() {
            return unsupported(
                "seq_q != seq_kv with cluster_on other than dual",
                "queries and keys share their labels; set cluster_on to dual",
            );
        }
        Ok(())
    }
}

fn unsupported(what: &'static str, why: &'static str) -> Result<()> {
    Err(Error::Unsupported { mechanism: "ssa", what, why })
}
