//! Fewer points of a curve that has too many to draw.

/// At most `most` of the points: the least and the largest of each group, in their order, so that no spike is lost and none is made.
pub fn extremes(points: &[(f64, f64)], most: usize) -> Vec<(f64, f64)> {
    if points.len() <= most {
        return points.to_vec();
    }
    let groups = points.chunks(points.len().div_ceil((most / 2).max(1)));
    let ends = |group: &[(f64, f64)]| {
        let by_value = |&a: &usize, &b: &usize| group[a].1.total_cmp(&group[b].1);
        let (least, largest) = ((0..group.len()).min_by(by_value), (0..group.len()).max_by(by_value));
        let mut kept: Vec<usize> = least.into_iter().chain(largest).collect();
        kept.sort_unstable();
        kept.dedup();
        kept.into_iter().map(|at| group[at]).collect::<Vec<_>>()
    };
    groups.flat_map(ends).collect()
}

/// At most `most` of the values, evenly spread, the first and the last among them.
pub fn evenly(values: &[f64], most: usize) -> Vec<f64> {
    if values.len() <= most {
        return values.to_vec();
    }
    (0..most).map(|n| values[n * (values.len() - 1) / (most - 1)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A single step that goes wrong is seen, with its own number.
    #[test]
    fn spikes_stay() {
        let mut points: Vec<_> = (0..10_001).map(|i| (f64::from(i), 1.0)).collect();
        (points[5000].1, points[7003].1) = (9.0, -3.0);
        let thinned = extremes(&points, 400);
        assert!(thinned.len() <= 400 && thinned.contains(&(5000.0, 9.0)) && thinned.contains(&(7003.0, -3.0)));
        assert!(thinned.windows(2).all(|pair| pair[0].0 < pair[1].0) && thinned.iter().all(|p| points.contains(p)));
        assert_eq!(extremes(&points[..400], 400), points[..400]);
    }

    #[test]
    fn both_ends_stay() {
        let values: Vec<f64> = (0..1000).map(f64::from).collect();
        let some = evenly(&values, 30);
        assert_eq!((some.len(), some[0], some[29]), (30, 0.0, 999.0));
        assert_eq!(evenly(&values[..30], 30), values[..30]);
    }
}
