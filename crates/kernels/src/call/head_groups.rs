//! Heads of keys and values that several heads of queries share.

/// Heads in groups: each head of keys serves as many heads of queries in a row.
#[derive(Debug, Clone, Copy)]
pub struct HeadGroups {
    /// Heads of keys of all batch elements.
    groups: usize,
    /// Heads of queries that each serves.
    size: usize,
}

impl HeadGroups {
    /// `heads` heads of queries and `kv_heads`, which divide them, of keys, of each of `batch` elements.
    pub const fn new(batch: usize, heads: usize, kv_heads: usize) -> Self {
        Self { groups: batch * kv_heads, size: heads / kv_heads }
    }

    /// Rows of heads of keys, once for every head of queries.
    pub fn repeat<T: Copy>(&self, x: &[T]) -> Vec<T> {
        let heads = x.chunks((x.len() / self.groups).max(1));
        heads.flat_map(|head| std::iter::repeat_n(head, self.size)).flatten().copied().collect()
    }

    /// What heads of queries have, added up within each group from the first head on.
    pub fn sum<T: Copy>(&self, each: &[T], add: impl Fn(T, T) -> T) -> Vec<T> {
        let len = (each.len() / (self.groups * self.size)).max(1);
        let group = |heads: &[T]| {
            let mut sums = heads[..len].to_vec();
            for head in heads.chunks(len).skip(1) {
                sums.iter_mut().zip(head).for_each(|(sum, &x)| *sum = add(*sum, x));
            }
            sums
        };
        each.chunks(len * self.size).flat_map(group).collect()
    }
}
