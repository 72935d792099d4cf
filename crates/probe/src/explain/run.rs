//! One example after the other.

use rand::RngExt;
use resolvent_lab::{
    Error, Result,
    data::rng::{Purpose, stream},
    environment::Environment,
};

use super::{
    Deletion, ExampleScores, ExplainOptions, Explanation, LayerAttention, LayerMaps, LayerScores, Localisation,
    MapKind, MapRule, MapScores, Shown, Spread, deletion,
    localisation::inside,
    rollout,
    weights::{flattened, positive},
};
use crate::subject::{Example, LayerCall, Region, Subject};

/// Fewest places of a layer whose map is taken where none is named: fewer say little of where something is.
const PLACES: usize = 16;

/// What is gathered while the examples go by.
pub(super) struct Run<'a> {
    options: &'a ExplainOptions,
    subject: &'a Subject,
    /// The layer that is scored, and what its map is.
    layer: String,
    rule: &'static str,
    /// One per kind of map.
    tallies: Vec<Tally>,
    /// One per layer.
    layers: Vec<LayerTally>,
    found: Vec<ExampleScores>,
    shown: Vec<Shown>,
    /// Texts that were cut.
    cut: usize,
}

/// The scores of one kind of map.
struct Tally {
    map: MapKind,
    deletions: Vec<Deletion>,
    found: Vec<Localisation>,
}

/// The scores of one layer.
struct LayerTally {
    layer: String,
    grid: Option<[usize; 2]>,
    breadth: Vec<f64>,
    mean: Vec<Localisation>,
    heads: Vec<Vec<f64>>,
}

/// Maps by their names.
type Maps = Vec<(MapKind, Vec<f32>)>;

impl<'a> Run<'a> {
    pub(super) fn new(options: &'a ExplainOptions, subject: &'a Subject) -> Self {
        let (tallies, layers, found, shown) = Default::default();
        Self { options, subject, layer: String::new(), rule: "", tallies, layers, found, shown, cut: 0 }
    }

    /// Whether there are the layer, the map through all layers and the rows that are asked for.
    pub(super) fn check(&self, example: &Example) -> Result<()> {
        let calls = self.subject.trace(example)?;
        let (attention, layers) = self.maps_of(&calls)?;
        let at = self.chosen(&layers)?;
        if self.options.rollout {
            self.rolled(&attention)?;
        }
        self.options.query.map_or(Ok(()), |query| query.rows(&calls, &attention, at).map(drop))
    }

    /// The attention of every layer, and its maps.
    fn maps_of<'b>(&self, calls: &'b [LayerCall]) -> Result<(Vec<LayerAttention<'b>>, Vec<LayerMaps>)> {
        let attention = calls.iter().map(LayerAttention::new).collect::<Result<Vec<_>>>()?;
        let rule = self.options.map_rule;
        let layers = calls.iter().zip(&attention).map(|(call, layer)| layer_maps(call, layer, rule));
        let layers = layers.collect::<Result<Vec<_>>>()?;
        Ok((attention, layers))
    }

    /// Adds example number `index`.
    pub(super) fn explain(&mut self, index: usize, example: &Example) -> Result<()> {
        let calls = self.subject.trace(example)?;
        let (attention, layers) = self.maps_of(&calls)?;
        let at = self.chosen(&layers)?;
        self.layer.clone_from(&layers[at].layer);
        self.rule = attention[at].rule();
        let rolled = if self.options.rollout { Some(self.rolled(&attention)?) } else { None };
        let found = if self.subject.is_causal() {
            let (answer, probability) = self.subject.next(example)?;
            self.count(&layers, example);
            ExampleScores::unscored(example.name(), answer, probability)
        } else {
            self.scored(index, example, &layers, at, rolled.as_deref())?
        };
        if self.shown.len() < self.options.shown {
            let query = self.options.query.map(|query| query.rows(&calls, &attention, at)).transpose()?;
            let pairs = calls[at].causal.then(|| attention[at].pairs()).transpose()?;
            let shown = shown(&found, example, layers, rolled);
            self.shown.push(Shown { query: query.unwrap_or_default(), pairs, ..shown });
        }
        self.found.push(found);
        self.cut += usize::from(example.is_cut());
        Ok(())
    }

    /// A classifier's answer to an example, and how well maps explain it; layer `at` is the one that is scored.
    fn scored(
        &mut self,
        index: usize,
        example: &Example,
        layers: &[LayerMaps],
        at: usize,
        rolled: Option<&[f32]>,
    ) -> Result<ExampleScores> {
        let chosen = &layers[at];
        let answers = self.subject.answers(example, chosen.grid, &[vec![false; chosen.mean.len()]])?;
        let most = answers[0].iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        let (answer, probability) = most.map_or((0, 0.0), |(class, &probability)| (class, probability));
        let maps = self.maps(index, &chosen.mean, rolled);
        let scores = maps.iter().map(|(_, weights)| self.score(index, example, chosen.grid, answer, weights));
        let scores = scores.collect::<Result<Vec<_>>>()?;
        let class = |class: usize| self.subject.classes()[class].clone();
        let found = ExampleScores {
            label: example.label().map(class),
            morf_aoc: Some(scores[0].0.morf_aoc()),
            lerf_auc: Some(scores[0].0.lerf_auc()),
            localisation: scores[0].1,
            ..ExampleScores::unscored(example.name(), class(answer), probability)
        };
        self.count(layers, example);
        self.tally(&maps, scores);
        Ok(found)
    }

    /// Which of the layers is scored.
    fn chosen(&self, layers: &[LayerMaps]) -> Result<usize> {
        let found = match &self.options.layer {
            Some(name) => layers.iter().position(|layer| layer.layer == *name),
            None => {
                let large = layers.iter().rposition(|layer| layer.grid.is_none() || layer.mean.len() >= PLACES);
                large.or_else(|| (0..layers.len()).max_by_key(|&layer| layers[layer].mean.len()))
            }
        };
        found.ok_or_else(|| {
            let there = layers.iter().map(|layer| layer.layer.as_str()).collect::<Vec<_>>().join(", ");
            let name = self.options.layer.as_deref().unwrap_or_default();
            let problem = format!("names `{name}`, which the model does not have; it has {there}");
            Error::Recipe { file: self.subject.path.clone(), field: "layer".into(), problem }
        })
    }

    fn rolled(&self, attention: &[LayerAttention<'_>]) -> Result<Vec<f32>> {
        rollout(attention)?.ok_or_else(|| {
            let problem = "needs layers over the same tokens, which a pyramid's are not; leave it out".into();
            Error::Recipe { file: self.subject.path.clone(), field: "rollout".into(), problem }
        })
    }

    /// The model's maps, then those without meaning: one of random weights, one of equal ones, whose order is drawn.
    fn maps(&self, index: usize, attention: &[f32], rolled: Option<&[f32]>) -> Maps {
        let mut rng = stream(Purpose::Deletion, self.options.seed, index as u64, 1);
        let random: Vec<f32> = attention.iter().map(|_| rng.random()).collect();
        let mut maps = vec![(MapKind::Attention, attention.to_vec())];
        maps.extend(rolled.map(|rolled| (MapKind::Rollout, rolled.to_vec())));
        maps.extend([(MapKind::Random, random), (MapKind::Uniform, vec![1.0; attention.len()])]);
        maps
    }

    /// One map of one example.
    fn score(
        &self,
        index: usize,
        example: &Example,
        grid: Option<[usize; 2]>,
        answer: usize,
        weights: &[f32],
    ) -> Result<(Deletion, Option<Localisation>)> {
        let ordered = deletion::order(weights, self.options.seed, index);
        let deletion = deletion::delete(self.subject, example, grid, answer, &ordered)?;
        Ok((deletion, located(example, grid).and_then(|inside| Localisation::new(weights, &inside))))
    }

    /// Adds one example to the scores of the maps.
    fn tally(&mut self, maps: &Maps, scores: Vec<(Deletion, Option<Localisation>)>) {
        if self.tallies.is_empty() {
            let tally = |&(map, _): &(_, _)| Tally { map, deletions: Vec::new(), found: Vec::new() };
            self.tallies = maps.iter().map(tally).collect();
        }
        for (tally, (deletion, found)) in self.tallies.iter_mut().zip(scores) {
            tally.deletions.push(deletion);
            tally.found.extend(found);
        }
    }

    /// Adds one example to the scores of the layers.
    fn count(&mut self, layers: &[LayerMaps], example: &Example) {
        if self.layers.is_empty() {
            self.layers = layers.iter().map(LayerTally::new).collect();
        }
        for (tally, maps) in self.layers.iter_mut().zip(layers) {
            tally.add(maps, located(example, maps.grid));
        }
    }

    pub(super) fn finish(self) -> Explanation {
        let Run { options, subject, .. } = self;
        let random =
            self.tallies.iter().find(|tally| tally.map == MapKind::Random).map_or(&[][..], |tally| &tally.deletions);
        let of = |tally: &Tally| MapScores::new(tally.map, &tally.deletions, &tally.found, random);
        let maps = self.tallies.iter().filter_map(of);
        Explanation {
            checkpoint: subject.path.clone(),
            step: subject.step,
            mechanism: subject.recipe.mechanism.clone(),
            data: options.data.clone(),
            examples: self.found.len(),
            cut: self.cut,
            layer: self.layer,
            rule: self.rule.into(),
            map_rule: options.map_rule,
            query: options.query,
            maps: maps.collect(),
            layers: self.layers.into_iter().filter_map(LayerTally::finish).collect(),
            shown: self.shown,
            answers: self.found,
            environment: Environment::on(&options.device),
            commands: options.commands.clone(),
        }
    }
}

impl LayerTally {
    fn new(maps: &LayerMaps) -> Self {
        let (layer, heads) = (maps.layer.clone(), vec![Vec::new(); maps.heads.len()]);
        Self { layer, grid: maps.grid, breadth: Vec::new(), mean: Vec::new(), heads }
    }

    /// Adds one example, of which the places `inside` boxes are known or not.
    fn add(&mut self, maps: &LayerMaps, inside: Option<Vec<bool>>) {
        self.breadth.push(maps.breadth());
        let Some(inside) = inside else { return };
        self.mean.extend(Localisation::new(&maps.mean, &inside));
        for (found, weights) in self.heads.iter_mut().zip(&maps.heads) {
            found.extend(Localisation::new(weights, &inside).map(|found| found.roc_auc));
        }
    }

    fn finish(self) -> Option<LayerScores> {
        Some(LayerScores {
            layer: self.layer,
            grid: self.grid,
            breadth: Spread::new(self.breadth)?,
            roc_auc: Spread::new(self.mean.iter().map(|found| found.roc_auc)),
            average_precision: Spread::new(self.mean.iter().map(|found| found.average_precision)),
            heads: self.heads.into_iter().map(Spread::new).collect(),
        })
    }
}

fn layer_maps(call: &LayerCall, layer: &LayerAttention<'_>, rule: MapRule) -> Result<LayerMaps> {
    let weights = layer.weights()?;
    let heads = weights.iter().map(|head| flattened(positive(head))).collect();
    Ok(LayerMaps { layer: call.place.name.clone(), grid: call.place.grid, mean: rule.map(&weights), heads })
}

/// The boxes of a picture, where known.
fn boxes(example: &Example) -> Option<&[Region]> {
    match example {
        Example::Picture(picture) => picture.boxes.as_deref(),
        Example::Text(_) => None,
    }
}

/// Which places of the grid are in boxes, where boxes are known.
fn located(example: &Example, grid: Option<[usize; 2]>) -> Option<Vec<bool>> {
    match example {
        Example::Picture(picture) => Some(inside(picture, picture.boxes.as_deref()?, grid?)),
        Example::Text(_) => None,
    }
}

fn shown(found: &ExampleScores, example: &Example, layers: Vec<LayerMaps>, rollout: Option<Vec<f32>>) -> Shown {
    let tokens = match example {
        Example::Text(text) => Some(text.words()),
        Example::Picture(_) => None,
    };
    let ExampleScores { name, label, answer, probability, .. } = found.clone();
    let (boxes, example) = (boxes(example).map(<[_]>::to_vec), example.clone());
    let (query, pairs) = Default::default();
    Shown { name, label, answer, probability, boxes, tokens, layers, rollout, query, pairs, example }
}
