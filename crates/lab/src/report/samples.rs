//! What a trained model says of some test examples, in the report of its run.

use maud::{Markup, html};

use crate::{
    page,
    train::{Continuation, Errors, Samples, Seen, Translation},
};

/// The section of a page.
pub(super) fn section(samples: &Samples) -> Markup {
    match samples {
        Samples::Errors(errors) => worst(errors),
        Samples::Translations(all) => translations(all),
        Samples::Continuations(all) => continuations(all),
    }
}

fn worst(errors: &Errors) -> Markup {
    let Errors { examples, wrong, worst } = errors;
    html! {
        h2 { "Worst errors" }
        p class="quiet" {
            "Of " (page::count(*examples)) " test examples, evenly spread, " (page::count(*wrong)) " are answered wrong"
            @if worst.is_empty() { "." } @else { "; these are the " (worst.len()) " whose own class the model finds least probable. They may also be labelled wrong." }
        }
        @if !worst.is_empty() {
            div class="scroll" {
                table class="sortable samples" {
                    thead { tr { @for heading in ["Example", "Shown", "Is", "Probability", "Answer", "Probability"] { th scope="col" { (heading) } } } }
                    tbody {
                        @for error in worst {
                            tr {
                                th scope="row" { (error.example) }
                                @match &error.shown {
                                    Seen::Picture(address) => td data-value=(error.example) { img class="thumbnail" src=(address) alt=(format!("test example {}, a {}", error.example, error.label)); }
                                    Seen::Text(text) => td class="words" { (text) }
                                }
                                td { (error.label) }
                                td { (page::percent(error.label_probability)) }
                                td { (error.answer) }
                                td { (page::percent(error.answer_probability)) }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A table of texts under `headings`.
fn texts<'a>(headings: [&str; 3], rows: impl Iterator<Item = [&'a str; 3]>) -> Markup {
    html! {
        div class="scroll" {
            table class="samples" {
                thead { tr { @for heading in headings { th scope="col" { (heading) } } } }
                tbody { @for row in rows { tr { @for text in row { td class="words" { (text) } } } } }
            }
        }
    }
}

fn translations(all: &[Translation]) -> Markup {
    html! {
        h2 { "Translations" }
        p class="quiet" { "Test sentences, evenly spread, translated by greedy search." }
        (texts(["Sentence", "Translation", "Reference"], all.iter().map(|one| [&*one.source, &one.translation, &one.reference])))
    }
}

fn continuations(all: &[Continuation]) -> Markup {
    html! {
        h2 { "Continuations" }
        p class="quiet" { "Pieces of the test text, evenly spread, and how the model goes on: every token is drawn from the model's probabilities as they are." }
        (texts(["Given", "Written", "Original"], all.iter().map(|one| [&*one.prompt, &one.continuation, &one.original])))
    }
}
