//! The paged cache: the bits of a cache of one batch, whatever shares its memory, and what is refused.

use crate::{cached, support};

use cached::{of_rows, problem, tokens};
use resolvent_kernels::{Cache, Error, Inputs, Mechanism, PagedCache, SequenceId, Shape};
use support::problem::Problem;

const SEQ: usize = 150;
const HEADS: usize = 4;

/// A problem of one sequence, its keys and values of `kv_heads`.
fn sequence(mechanism: &Mechanism, kv_heads: usize, seed: u64) -> Problem {
    let shape = Shape { value_dim: 3, ..Shape::square(1, HEADS, SEQ, 6) };
    let mut p = problem(mechanism.clone(), shape, seed);
    p.k.iter_mut().for_each(|k| k.truncate(kv_heads * SEQ * 6));
    p.v.truncate(kv_heads * SEQ * 3);
    p
}

/// The tensors of tokens `from..from + new` of several problems.
fn step_of(problems: &[(&Problem, usize)], new: usize) -> [Vec<f32>; 3] {
    let mut all = [const { Vec::new() }; 3];
    for &(p, from) in problems {
        all[0].extend(tokens(&p.q, SEQ, 6, from, from + new));
        all[1].extend(p.k.iter().flat_map(|k| tokens(k, SEQ, 6, from, from + new)));
        all[2].extend(tokens(&p.v, SEQ, 3, from, from + new));
    }
    all
}

fn inputs<'a>(p: &'a Problem, [q, k, v]: &'a [Vec<f32>; 3]) -> Inputs<'a, f32> {
    Inputs { q, k: p.k.is_some().then_some(&k[..]), v, extras: p.extras() }
}

/// Rows of tokens `from..from + new` in a cache of one sequence.
fn alone(p: &Problem, cache: &mut Cache, from: usize, new: usize) -> Vec<f32> {
    let step = step_of(&[(p, from)], new);
    let mut out = vec![f32::NAN; HEADS * new * 3];
    cache.step(&inputs(p, &step), &mut out).unwrap();
    out
}

/// The same of several sequences at once.
fn together(cache: &mut PagedCache, of: &[(SequenceId, &Problem, usize)], new: usize) -> Vec<Vec<f32>> {
    let ids: Vec<SequenceId> = of.iter().map(|(id, ..)| *id).collect();
    let step = step_of(&of.iter().map(|&(_, p, from)| (p, from)).collect::<Vec<_>>(), new);
    let mut out = vec![f32::NAN; of.len() * HEADS * new * 3];
    cache.step(&ids, &inputs(of[0].1, &step), &mut out).unwrap();
    out.chunks(HEADS * new * 3).map(<[f32]>::to_vec).collect()
}

fn caches(mechanism: &Mechanism, kv_heads: usize, block_size: usize, blocks: usize) -> (PagedCache, Cache) {
    let paged = PagedCache::new(mechanism, HEADS, 6, 3, block_size, blocks).unwrap();
    let one = Cache::new(mechanism, 1, HEADS, 6, 3, 4).unwrap();
    (paged.with_kv_heads(kv_heads).unwrap(), one.with_kv_heads(kv_heads).unwrap())
}

/// Sequences of several lengths, a fork in the middle of a block among them, are what each is alone: bit for bit, a ring and a block
/// table being read in the same order.
#[test]
fn every_sequence_is_as_alone() {
    for (n, mechanism) in of_rows().enumerate() {
        let kv_heads = if n % 2 == 0 || mechanism.tied { HEADS } else { 2 };
        let block_size = [16, 48][n % 2];
        let (mut paged, cache) = caches(&mechanism, kv_heads, block_size, 40);
        let [a, b] = [1, 2].map(|seed| sequence(&mechanism, kv_heads, seed));
        let [first, second] = [paged.add(), paged.add()];
        let [mut of_a, mut of_b] = [cache.clone(), cache.clone()];
        assert_eq!(together(&mut paged, &[(first, &a, 0)], 37), [alone(&a, &mut of_a, 0, 37)], "{mechanism}");
        let step = step_of(&[(&b, 0)], 5);
        paged.append(&[second], &inputs(&b, &step)).unwrap();
        of_b.append(&inputs(&b, &step)).unwrap();
        // The fork goes on with the other's tokens.
        let (fork, mut of_fork) = (paged.fork(first).unwrap(), of_a.clone());
        let mut at = [37, 5, 37];
        for new in [1, 1, 30, 1, 17, 40] {
            let of = [(first, &a, at[0]), (second, &b, at[1]), (fork, &b, at[2])];
            let rows = together(&mut paged, &of, new);
            let [x, y] = [alone(&a, &mut of_a, at[0], new), alone(&b, &mut of_b, at[1], new)];
            let z = alone(&b, &mut of_fork, at[2], new);
            assert_eq!(rows, [x, y, z], "{mechanism}, {at:?} + {new}");
            at = at.map(|at| at + new);
        }
        assert_eq!([first, second, fork].map(|id| paged.len(id).unwrap()), at);
        paged.sequences().collect::<Vec<_>>().into_iter().for_each(|id| paged.free(id).unwrap());
        assert_eq!(paged.free_blocks(), paged.blocks(), "{mechanism}");
    }
}

fn softmax() -> Mechanism {
    Mechanism::preset("softmax").unwrap()
}

/// Blocks are shared until someone writes into one, and are used again once nobody refers to them.
#[test]
fn blocks_are_shared_copied_and_used_again() {
    let (mut cache, _) = caches(&softmax(), HEADS, 16, 6);
    let p = sequence(&softmax(), HEADS, 3);
    let prompt = cache.add();
    together(&mut cache, &[(prompt, &p, 0)], 40);
    let beams = [0, 1].map(|_| cache.fork(prompt).unwrap());
    assert_eq!(cache.free_blocks(), 3);
    // Six blocks of 16 tokens: keys of 6 channels and values of 3.
    assert_eq!(cache.bytes(), 4 * 6 * 16 * HEADS * (6 + 3));
    assert_eq!(cache.block_table(beams[0]).unwrap(), cache.block_table(prompt).unwrap());
    // Two of three write: both copy, the third has the block.
    let of: Vec<_> = beams.map(|beam| (beam, &p, 40)).into();
    let rows = together(&mut cache, &of, 1);
    assert_eq!(rows[0], rows[1]);
    assert_eq!(cache.free_blocks(), 1);
    let tables = [prompt, beams[0], beams[1]].map(|id| cache.block_table(id).unwrap());
    assert_eq!((&tables[0][..2], &tables[0][..2]), (&tables[1][..2], &tables[2][..2]));
    assert!(tables[0][2] != tables[1][2] && tables[1][2] != tables[2][2]);
    // All who share a block write: the last has it.
    cache.free(beams[1]).unwrap();
    let twin = cache.fork(prompt).unwrap();
    let before = cache.free_blocks();
    together(&mut cache, &[(prompt, &p, 40), (twin, &p, 40)], 1);
    assert_eq!(cache.free_blocks(), before - 1);
    // Freed blocks hold another sequence, of which nothing is left of the old one.
    let (mut other, _) = caches(&softmax(), HEADS, 16, 6);
    let fresh = other.add();
    let q = sequence(&softmax(), HEADS, 4);
    let expected = together(&mut other, &[(fresh, &q, 0)], 90);
    for id in [prompt, beams[0], twin] {
        cache.free(id).unwrap();
    }
    assert_eq!(cache.free_blocks(), 6);
    let again = cache.add();
    assert_eq!(together(&mut cache, &[(again, &q, 0)], 90), expected);
    assert_eq!(cache.free_blocks(), 0);
}

/// A call that blocks are missing for changes nothing, and goes through once there are some.
#[test]
fn out_of_blocks_leaves_the_cache_as_it_was() {
    let (mut cache, mut of_one) = caches(&softmax(), HEADS, 16, 4);
    let p = sequence(&softmax(), HEADS, 5);
    let first = cache.add();
    together(&mut cache, &[(first, &p, 0)], 20);
    alone(&p, &mut of_one, 0, 20);
    let [second, third] = [cache.fork(first).unwrap(), cache.fork(first).unwrap()];
    let table = cache.block_table(first).unwrap();
    // Three writers into a shared block, two of which copy it, and a further block for each.
    let step = step_of(&[(&p, 20), (&p, 20), (&p, 20)], 13);
    let mut out = vec![7.0; 3 * HEADS * 13 * 3];
    let refused = cache.step(&[first, second, third], &inputs(&p, &step), &mut out).unwrap_err();
    assert_eq!(refused, Error::OutOfBlocks { needed: 5, free: 2, blocks: 4, block_size: 16 });
    assert!(out.iter().all(|&x| x == 7.0) && refused.to_string().contains("free sequences"));
    assert!(matches!(cache.append(&[first, second, third], &inputs(&p, &step)), Err(Error::OutOfBlocks { .. })));
    assert_eq!((cache.free_blocks(), cache.len(first).unwrap()), (2, 20));
    assert_eq!(cache.block_table(first).unwrap(), table);
    let rows = together(&mut cache, &[(first, &p, 20), (second, &p, 20), (third, &p, 20)], 12);
    let expected = alone(&p, &mut of_one, 20, 12);
    assert!(rows.iter().all(|rows| *rows == expected) && cache.free_blocks() == 0);
    cache.free(second).unwrap();
    assert_eq!(together(&mut cache, &[(third, &p, 32)], 1), [alone(&p, &mut of_one, 32, 1)]);
}

/// A window has the blocks of its tokens and of the sinks, however long the decoding goes on.
#[test]
fn blocks_behind_a_window_are_free() {
    let json = r#"{"mechanism": "local", "causal": true, "window": 20, "sinks": 18}"#;
    let mechanism = Mechanism::from_json(json).unwrap();
    let (mut paged, mut cache) = caches(&mechanism, 2, 16, 5);
    let p = sequence(&mechanism, 2, 6);
    let id = paged.add();
    for at in 0..SEQ {
        assert_eq!(together(&mut paged, &[(id, &p, at)], 1), [alone(&p, &mut cache, at, 1)], "{at}");
    }
    assert!(paged.block_table(id).unwrap().len() <= 5 && SEQ > 5 * 16);
    let fork = paged.fork(id).unwrap();
    paged.free(id).unwrap();
    assert_eq!(paged.len(fork).unwrap(), SEQ);
    paged.free(fork).unwrap();
    assert_eq!(paged.free_blocks(), 5);
}

/// Rows that leave f32 are an error, those of what was no number already are not.
#[test]
fn overflow_is_told_from_infinite_tokens() {
    let json = r#"{"mechanism": "composed", "causal": true, "score": "dot-exp", "normalisation": "none"}"#;
    let mechanism = Mechanism::from_json(json).unwrap();
    for (value, overflows) in [(1.0, true), (f32::INFINITY, false)] {
        let mut paged = PagedCache::new(&mechanism, 1, 2, 2, 16, 1).unwrap();
        let mut cache = Cache::new(&mechanism, 1, 1, 2, 2, 1).unwrap();
        let id = paged.add();
        for (k, v) in [([0.0; 2], [value; 2]), ([30.0; 2], [1.0; 2])] {
            let step = Inputs { q: &[30.0; 2], k: Some(&k), v: &v, extras: Default::default() };
            let told = [paged.step(&[id], &step, &mut [0.0; 2]), cache.step(&step, &mut [0.0; 2])];
            let fails = overflows && k[0] > 0.0;
            assert!(told.iter().all(|told| matches!(told, Err(Error::Overflow { .. })) == fails), "{told:?}");
        }
    }
}

#[test]
fn what_is_wrong_is_told() {
    for (json, why) in [
        (r#"{"mechanism": "uniform"}"#, "sum"),
        (r#"{"mechanism": "linear"}"#, "sum"),
        (r#"{"mechanism": "ssa"}"#, "cluster"),
        (r#"{"mechanism": "routed"}"#, "cluster"),
    ] {
        let refused = PagedCache::new(&Mechanism::from_json(json).unwrap(), 2, 4, 4, 16, 4).unwrap_err();
        let told = refused.to_string().contains(why);
        assert!(matches!(refused, Error::Unsupported { what: "a paged cache", .. }) && told, "{json}: {refused}");
    }
    for id in ["linear-infsa", "laplacian-exact", "soft"] {
        let refused = PagedCache::new(&Mechanism::preset(id).unwrap(), 2, 4, 4, 16, 4).unwrap_err();
        assert!(matches!(refused, Error::Unsupported { mechanism, .. } if mechanism == id), "{refused}");
    }
    for (size, blocks, wrong) in
        [(0, 4, "block_size"), (8, 4, "block_size"), (16, 0, "blocks"), (16, 1 << 40, "blocks")]
    {
        let refused = PagedCache::new(&softmax(), 2, 4, 4, size, blocks).unwrap_err();
        assert!(matches!(refused, Error::OutOfRange { field, .. } if field == wrong), "{refused}");
    }
    let mut cache = PagedCache::new(&softmax(), 2, 4, 4, 16, 4).unwrap();
    let (id, other) = (cache.add(), PagedCache::new(&softmax(), 2, 4, 4, 16, 4).unwrap().add());
    let (x, mut out) = ([0.5; 16], [0.0; 16]);
    let one = Inputs { q: &x[..8], k: Some(&x[..8]), v: &x[..8], extras: Default::default() };
    let two = Inputs { q: &x, k: Some(&x), v: &x, extras: Default::default() };
    assert!(matches!(cache.step(&[other], &one, &mut out[..8]), Err(Error::UnknownSequence { op: "step", .. })));
    assert!(matches!(cache.append(&[id, other], &two), Err(Error::UnknownSequence { op: "append", .. })));
    for twice in [&[id, id][..], &[]] {
        assert!(matches!(cache.step(twice, &two, &mut out), Err(Error::OutOfRange { field: "sequences", .. })));
    }
    let short = Inputs { v: &x[..4], ..one };
    assert!(matches!(cache.step(&[id], &short, &mut out[..8]), Err(Error::Length { tensor: "v", .. })));
    assert!(matches!(cache.step(&[id], &one, &mut out[..7]), Err(Error::Length { tensor: "out", .. })));
    assert_eq!((cache.len(id), cache.free_blocks()), (Ok(0), 4));
    cache.step(&[id], &one, &mut out[..8]).unwrap();
    cache.free(id).unwrap();
    for wrong in [cache.free(id), cache.fork(id).map(drop), cache.len(id).map(drop), cache.block_table(id).map(drop)] {
        assert!(matches!(wrong, Err(Error::UnknownSequence { .. })));
    }
    assert!(matches!(cache.with_kv_heads(3), Err(Error::OutOfRange { field: "kv_heads", .. })));
}
