//! Labelled texts from files, and what is said of files that cannot be used.

use std::{fs, io::Write, path::Path};

use resolvent_lab::data::{Data, DataSpec, Error, Result, TextDataset};

fn load(spec: &str) -> Result<TextDataset> {
    match spec.parse::<DataSpec>()?.load()? {
        Data::Texts(texts) => Ok(texts),
        other => panic!("{other:?}"),
    }
}

fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    folder
}

fn at(kind: &str, path: &Path, settings: &str) -> String {
    format!("{kind}:{}{settings}", path.display())
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

const CSV: &str = "label,text\nspam,\"Buy, now\"\nham,See you\nspam,\"two\nlines\"\n";
const JSONL: &str = "{\"text\": \"a\\u2028b\", \"label\": 10}\n{\"label\": 9, \"text\": \"c\", \"id\": [1]}\n{\"text\": \"d\", \"label\": 10}\n";

#[test]
fn formats_compression_and_classes() {
    let files = folder(&[("train.csv", CSV.as_bytes()), ("test.csv.gz", &gzip(b"text,label\nhello,ham\n"))]);
    let data = load(&at("text", files.path(), "")).unwrap();
    assert_eq!(data.classes, ["ham", "spam"]);
    assert_eq!(data.train.texts[0], ["Buy, now", "See you", "two\nlines"]);
    assert_eq!(
        (data.train.labels, data.test.texts, data.test.labels),
        (vec![1, 0, 1], [vec!["hello".into()]], vec![0])
    );

    let files = folder(&[("all.jsonl", JSONL.as_bytes()), ("t.tsv", b"y\tx\n1\tp\tq\n")]);
    let data = load(&at("text", &files.path().join("all.jsonl"), "")).unwrap();
    assert_eq!(data.classes, ["9", "10"], "numbers in their order");
    let texts: Vec<_> = data.train.texts[0].iter().chain(&data.test.texts[0]).collect();
    assert!(texts.len() == 3 && texts.iter().any(|text| *text == "a\u{2028}b"), "{texts:?}");
    assert_eq!(data.test.len(), 1, "a fifth of every class of two or more");

    let columns = "?text=x&label=y";
    let error = load(&at("text", &files.path().join("t.tsv"), columns)).unwrap_err();
    assert!(matches!(error, Error::Line { line: 2, .. }), "{error}");
    let spec = at("text", files.path(), columns);
    assert_eq!(spec.parse::<DataSpec>().unwrap().to_string(), spec);
}

#[test]
fn reviews_have_named_classes_and_no_mark_up() {
    let train = "{\"label\": 1, \"text\": \"good<br /><br />film\"}\n{\"label\": 0, \"text\": \"bad\"}\n";
    let files = folder(&[("train.jsonl", train.as_bytes()), ("test.jsonl", train.as_bytes())]);
    let data = load(&at("imdb", files.path(), "")).unwrap();
    assert_eq!(data.classes, ["negative", "positive"]);
    assert_eq!((&data.train.texts[0][0][..], data.train.labels[0]), ("good  film", 1));
    assert_eq!(data.train, data.test);
    let other = folder(&[("train.jsonl", JSONL.as_bytes())]);
    let message = load(&at("imdb", other.path(), "")).unwrap_err().to_string();
    assert!(message.contains("9, 10") && message.contains("text:PATH"), "{message}");
}

#[test]
fn what_cannot_be_used_is_named_with_file_and_line() {
    let line = |text: &str| format!("{{\"text\": \"{text}\", \"label\": 1}}\n");
    let good = line("a") + &line("b").replace('1', "0");
    let cases: Vec<(&str, Vec<u8>, &[&str])> = vec![
        ("bad.jsonl", [good.as_bytes(), b"\xff\xfe\n"].concat(), &["bad.jsonl", "line 3", "UTF-8"]),
        ("bad.jsonl", (good.clone() + "\n" + &good).into(), &["line 3", "empty"]),
        ("bad.jsonl", (good.clone() + &line("  ")).into(), &["line 3 has an empty text"]),
        ("bad.jsonl", (good.clone() + "{\"text\": \"x\"}\n").into(), &["line 3", "`label`"]),
        ("bad.jsonl", (good.clone() + "no\n").into(), &["line 3", "JSON"]),
        ("bad.jsonl", line("a").into(), &["1 class"]),
        ("bad.jsonl", vec![], &["bad.jsonl", "no text"]),
        ("bad.csv", b"a,b\n1,2\n".to_vec(), &["`text`", "`a`, `b`"]),
        ("bad.csv", b"text,label\nx,1\ny\n".to_vec(), &["bad.csv", "line 3"]),
        ("bad.csv", b"text,label\r\nx,1\r\ny\r\n".to_vec(), &["bad.csv: line 3 has 1 columns"]),
        ("bad.csv", b"text,label\nx,1\n\ny,2\n".to_vec(), &["bad.csv", "line 3 is empty"]),
        ("bad.csv", b"text,label\r\nx,1\r\n\r\ny,2\r\n".to_vec(), &["bad.csv", "line 3 is empty"]),
        ("bad.csv", b"text,label\n\"x\n\n\",1\ny,2\n\n".to_vec(), &["bad.csv", "line 6 is empty"]),
        ("bad.csv", b"\ntext,label\nx,1\ny,2\n".to_vec(), &["bad.csv", "line 1 is empty"]),
        ("bad.tsv", b"text\tlabel\n\nx\t1\ny\t2\n".to_vec(), &["bad.tsv", "line 2 is empty"]),
        ("bad.csv", b"text,label\nx,1\r\n,2\n".to_vec(), &["line 3 has an empty text"]),
        ("bad.csv", b"text,label\nx,1\ny,2\nz,\n".to_vec(), &["line 4 has no label"]),
        ("bad.csv", b"text,label\nx,1\ny,2\nz,1 \n".to_vec(), &["line 4 has the label `1 `", "spaces"]),
        ("bad.jsonl", (good.clone() + &line("c").replace('1', "\"\"")).into(), &["line 3 has no label"]),
        ("bad.txt", b"x".to_vec(), &["bad.txt", ".jsonl"]),
    ];
    for (name, bytes, expected) in cases {
        let files = folder(&[(name, &bytes)]);
        let message = load(&at("text", &files.path().join(name), "")).unwrap_err().to_string();
        for part in expected {
            assert!(message.contains(part) && !message.contains('\n'), "`{message}` lacks `{part}`");
        }
    }
}

#[test]
fn classes_are_sorted_and_each_is_one() {
    for (labels, sorted) in [
        (&["1", "01", "2", "1", "01", "10"][..], &["01", "1", "2", "10"][..]),
        (&["-0", "0", "+1", "1", "-0", "0"], &["-0", "0", "+1", "1"]),
        (&["9", "1a", "10", "9"], &["10", "1a", "9"]),
        (&["b", "a", "B"], &["B", "a", "b"]),
    ] {
        let rows: String = labels.iter().map(|label| format!("text,{label}\n")).collect();
        let files =
            folder(&[("train.csv", format!("text,label\n{rows}").as_bytes()), ("test.csv", b"text,label\nx,1\n")]);
        let found = match load(&at("text", files.path(), "")) {
            Ok(data) => data.classes.join(", "),
            Err(Error::UnknownLabel { classes, .. }) => classes,
            Err(other) => panic!("{other}"),
        };
        assert_eq!(found, sorted.join(", "));
    }
}

#[test]
fn a_validation_part_is_found_by_its_name() {
    let (csv, part) = (CSV.as_bytes(), b"text,label\nmaybe,spam\n".as_slice());
    for name in ["val.csv", "valid.csv", "validation.csv", "dev.csv", "val/spam/a.txt", "validation/spam/a.txt"] {
        let part = if name.ends_with(".txt") { b"maybe".as_slice() } else { part };
        let data =
            load(&at("text", folder(&[("train.csv", csv), ("test.csv", csv), (name, part)]).path(), "")).unwrap();
        let validation = data.validation.clone().unwrap();
        assert_eq!((validation.texts, validation.labels), ([vec!["maybe".to_owned()]], vec![1]), "{name}");
        assert_eq!((data.train.len(), data.test.len()), (3, 3));
        assert_ne!(TextDataset { validation: None, ..data.clone() }.fingerprint(), data.fingerprint());
    }
    let unknown = folder(&[("train.csv", csv), ("test.csv", csv), ("val.csv", b"text,label\nx,eggs\n")]);
    assert!(load(&at("text", unknown.path(), "")).unwrap_err().to_string().contains("`eggs`"));
}

#[test]
fn labels_of_the_test_part_must_have_been_learnt() {
    let files = folder(&[("train.csv", CSV.as_bytes()), ("test.csv", b"text,label\nhello,eggs\n")]);
    let error = load(&at("text", files.path(), "")).unwrap_err();
    assert!(matches!(&error, Error::UnknownLabel { line: 2, label, .. } if label == "eggs"), "{error}");
    assert!(error.to_string().contains("ham, spam"));
}

#[test]
fn folders_hold_one_training_part() {
    let missing = load(&at("text", folder(&[]).path(), "")).unwrap_err().to_string();
    assert!(missing.contains("train.jsonl"), "{missing}");
    let both = folder(&[("val.csv", CSV.as_bytes()), ("valid/ham/a.txt", b"x")]);
    let message = load(&at("text", both.path(), "")).unwrap_err().to_string();
    assert!(message.contains("`val.csv` and `valid` are both there"), "{message}");
    let both = folder(&[("train.csv", CSV.as_bytes()), ("train.jsonl", JSONL.as_bytes())]);
    let message = load(&at("text", both.path(), "")).unwrap_err().to_string();
    assert!(message.contains("train.csv") && message.contains("train.jsonl"), "{message}");
    for spec in ["text", "imdb:", "text:x?words=y", "text:x?text=a&text=b", "novel:x"] {
        assert!(load(spec).is_err(), "{spec}");
    }
}

const REVIEWS: [(&str, &[u8]); 7] = [
    ("train/pos/1_9.txt", b"good<br />film"),
    ("train/pos/0_10.txt", b"best"),
    ("train/neg/0_1.txt", b"bad"),
    ("train/unsup/0_0.txt", b"unknown"),
    ("train/urls_pos.txt", b"http"),
    ("test/neg/0_2.txt", b"worse\n"),
    ("test/pos/.hidden", b""),
];

#[test]
fn folders_of_classes_hold_one_text_a_file() {
    let files = folder(&REVIEWS);
    let data = load(&at("text", files.path(), "")).unwrap();
    assert_eq!(data.classes, ["neg", "pos"]);
    assert_eq!(
        (data.train.texts, data.train.labels),
        ([vec!["bad".into(), "best".into(), "good<br />film".into()]], vec![0, 1, 1])
    );
    assert_eq!((data.test.texts, data.test.labels), ([vec!["worse\n".into()]], vec![0]));

    let reviews = load(&at("imdb", files.path(), "")).unwrap();
    assert_eq!((reviews.classes[0].as_str(), reviews.train.texts[0][2].as_str()), ("negative", "good film"));
}

#[test]
fn what_is_no_text_in_a_folder_of_classes_is_named() {
    let error = |extra: (&str, &[u8]), settings: &str| {
        let files = folder(&[&REVIEWS[..], &[extra]].concat());
        load(&at("text", files.path(), settings)).unwrap_err().to_string()
    };
    assert!(error(("train/pos/a.png", b"x"), "").contains("pos: `a.png` is no text"));
    assert!(error(("train/pos/a.txt", b" \n"), "").contains("a.txt: line 1 has an empty text"));
    assert!(error(("train/pos/a.txt", b"a\n\xff"), "").contains("a.txt: line 2 is not UTF-8"));
    assert!(error(("test/odd/a.txt", b"x"), "").contains("a.txt: line 1 has the label `odd`"));
    assert!(error(("train.csv", b"x"), "").contains("`train.csv` and `train` are both there"));
    assert!(error(("test/pos/a.txt", b"x"), "?text=a").contains("has no columns"));
}
