//! What happens: chains of causes, each of which changes the world and is told.

use crate::Impossible;
use crate::lexicon::lexicon;
use crate::story::{Story, capitalised, invented};

type Result = std::result::Result<(), Impossible>;

impl Story {
    /// One of all plots.
    pub(crate) fn plot(&mut self) -> Result {
        type Plot = fn(&mut Story) -> Result;
        const PLOTS: [(&str, Plot); 22] = [
            ("lost and found", Story::lost),
            ("wish", Story::wish),
            ("gift", Story::gift),
            ("animal", Story::pet),
            ("broken", Story::broken),
            ("errand", Story::errand),
            ("fear", Story::fear),
            ("contest", Story::contest),
            ("storm", Story::storm),
            ("making", Story::making),
            ("mystery", Story::mystery),
            ("quarrel", Story::quarrel),
            ("key", Story::key),
            ("stuck", Story::stuck),
            ("learning", Story::learning),
            ("trades", Story::trades),
            ("hide and seek", Story::hide_and_seek),
            ("market", Story::market),
            ("seed", Story::seed),
            ("note", Story::note),
            ("newcomer", Story::newcomer),
            ("night", Story::night),
        ];
        let (name, plot) = *self.choices().pick(&PLOTS);
        if self.teller.labels.insert(name.to_owned()) {
            plot(self)?;
        }
        Ok(())
    }

    fn number(&mut self, low: usize, high: usize) -> (usize, String) {
        let number = self.choices().between(low, high);
        (number, lexicon().number(number))
    }

    fn bind_number(&mut self, role: &'static str, low: usize, high: usize) -> usize {
        let (number, word) = self.number(low, high);
        self.bind(role, word);
        number
    }

    fn bind_day(&mut self) {
        const DAYS: [&str; 7] =
            ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
        let day = *self.choices().pick(&DAYS);
        self.bind("D", day);
    }

    fn lost(&mut self) -> Result {
        let thing = self.new_thing("O", &["small", "toy", "wear"]);
        let main = self.id("A");
        self.world.own(main, thing);
        self.teller.set_owner(thing, Some(main));
        self.tell("lost.have");
        if self.chance(60) {
            self.new_place("R");
            self.travel(&[]);
        }
        self.world.leave(main, thing)?;
        self.perhaps(60, "lost.drop");
        self.aside();
        self.tell("lost.notice");
        self.perhaps(40, "sorrow");
        self.mood("feeling-bad");
        for _ in 0..self.choices().between(1, 3) {
            self.tell("lost.search");
        }
        self.teller.paragraph();
        self.meet("B");
        self.tell("lost.ask");
        self.tell("lost.no");
        self.perhaps(50, "lost.search");
        self.mood("thought");
        if self.chance(35) {
            self.new_animal("N", &["pet", "small"]);
            self.tell("lost.animal");
            self.tell("lost.animal-end");
        } else {
            self.tell("lost.find");
        }
        self.world.take(main, thing)?;
        self.tell("joy");
        self.perhaps(60, "thank-b");
        Ok(())
    }

    fn wish(&mut self) -> Result {
        let (main, other) = (self.id("A"), self.id("B"));
        self.meet("B");
        let thing = self.new_thing("O", &["toy", "small", "wear", "music"]);
        self.world.own(other, thing);
        self.tell("wish.want");
        self.mood("thought");
        match self.choices().below(3) {
            0 => {
                self.tell("wish.ask");
                self.tell("refuse");
                self.perhaps(30, "sorrow");
                let offered = self.new_thing("Q", &["toy", "small", "food"]);
                self.world.own(main, offered);
                self.tell("wish.trade");
                self.perhaps(50, "agree");
                self.tell("wish.traded");
                self.world.give(main, other, offered)?;
                self.world.give(other, main, thing)?;
                self.tell("joy");
            }
            1 => {
                self.tell("wish.ask");
                self.tell("wish.lend");
                self.world.hand(other, main, thing)?;
                self.perhaps(70, "wish.care");
                self.aside();
                self.tell("wish.care");
                self.tell("wish.back");
                self.world.hand(main, other, thing)?;
                self.perhaps(60, "thank-a");
            }
            _ => {
                self.tell("wish.steal");
                self.world.hand(other, main, thing)?;
                self.aside();
                self.tell("wish.guilt");
                self.mood("feeling-bad");
                self.tell("wish.confess");
                self.world.hand(main, other, thing)?;
                self.tell("forgive");
            }
        }
        Ok(())
    }

    fn gift(&mut self) -> Result {
        let (main, other) = (self.id("A"), self.id("B"));
        self.bind_day();
        self.bind_number("K", 5, 14);
        self.tell("gift.plan");
        self.mood("thought");
        let thing = if self.chance(50) {
            let thing = self.new_thing("O", &["toy", "paper", "wear"]);
            self.tell("gift.make");
            thing
        } else {
            self.meet("G");
            self.bind_number("K", 3, 9);
            self.tell("gift.earn");
            self.perhaps(30, "thank-g");
            self.new_place("R");
            self.travel(&[]);
            let thing = self.new_thing("O", &["toy", "small", "wear", "breaks"]);
            self.tell("gift.buy");
            thing
        };
        self.world.own(main, thing);
        self.tell("gift.hide");
        self.aside();
        self.teller.paragraph();
        self.join("B");
        self.tell("gift.day");
        self.tell("give");
        self.world.give(main, other, thing)?;
        self.tell("gift.love");
        self.tell("thank");
        self.perhaps(50, "eat");
        Ok(())
    }

    fn pet(&mut self) -> Result {
        self.new_animal("N", &["small", "wild", "pet", "wings"]);
        self.new_thing("T", &["tool"]);
        self.bind_number("K", 2, 9);
        self.tell("pet.find");
        self.tell("pet.hurt");
        self.perhaps(60, "pet.near");
        self.mood("feeling-bad");
        if self.chance(50) {
            self.teller.paragraph();
            self.meet("B");
            self.tell("ask-help");
            self.tell("agree");
        } else {
            self.join("B");
        }
        self.tell("pet.free");
        self.tell("pet.feed");
        self.perhaps(40, "pet.feed");
        if self.chance(45) {
            let name = capitalised(self.choices().pick::<String>(invented()));
            self.bind("W", name);
            self.teller.labels.insert("invented name".into());
            self.tell("pet.name");
        }
        self.aside();
        if self.chance(50) {
            self.tell("pet.gone");
            if self.chance(50) {
                self.new_thing("O", &["small"]);
                self.tell("pet.return");
            }
        } else {
            self.tell("pet.stay");
        }
        Ok(())
    }

    fn broken(&mut self) -> Result {
        let other = self.id("B");
        self.join("B");
        let thing = self.new_thing("O", &["breaks", "dish"]);
        self.new_animal("N", &["pet"]);
        self.bind_number("K", 2, 9);
        self.world.own(other, thing);
        self.teller.say(
            "{B.n} ~have {O.a}[, and ~love it|, old and fine|, a present from {B.p} grandmother|].",
            &[],
        );
        self.tell("break.play");
        self.world.break_it(thing)?;
        self.tell("break.break");
        self.perhaps(40, "sorrow");
        self.mood("feeling-bad");
        if self.chance(60) {
            self.tell("break.hide");
            self.aside();
            self.teller.paragraph();
            self.tell("break.where");
            self.perhaps(50, "break.lie");
            self.mood("thought");
        }
        self.tell("break.tell");
        self.tell("forgive");
        if self.chance(70) {
            self.world.mend(thing)?;
            self.tell("break.mend");
        }
        Ok(())
    }

    fn errand(&mut self) -> Result {
        let (main, other, grown) = (self.id("A"), self.id("B"), self.id("G"));
        self.join("G");
        let thing = self.new_thing("O", &["food", "paper", "tool", "wear"]);
        self.new_animal("N", &["big", "farm"]);
        self.world.own(grown, thing);
        let far = self.new_place("R");
        self.world.go(other, far);
        self.tell("way.task");
        self.world.hand(grown, main, thing)?;
        self.tell("go-way");
        self.aside();
        for _ in 0..self.choices().between(1, 2) {
            self.tell("way.trouble");
            self.mood("feeling-bad");
            let helped = self.chance(50);
            self.tell(if helped { "way.help" } else { "way.alone" });
            if helped && self.chance(40) {
                self.tell_as("thank", "AC BA");
            }
        }
        self.teller.paragraph();
        self.world.go(main, far);
        self.arrive();
        self.tell("way.there");
        self.tell("give");
        self.world.give(main, other, thing)?;
        self.tell("thank");
        self.perhaps(50, "eat");
        Ok(())
    }

    fn fear(&mut self) -> Result {
        const FEARS: [&str; 12] = [
            "the dark",
            "deep water",
            "thunder",
            "the big dog next door",
            "high ladders",
            "the cellar stairs",
            "strangers",
            "spiders",
            "the old mill",
            "the school stage",
            "horses",
            "the long tunnel",
        ];
        let fear = *self.choices().pick(&FEARS);
        self.bind("X", fear);
        self.join("B");
        self.tell("fear.of");
        self.aside();
        let thing = self.new_thing("O", &["toy", "small", "wear"]);
        let other = self.id("B");
        self.world.own(other, thing);
        self.tell("fear.must");
        self.tell("fear.try");
        self.tell("fear.try");
        self.mood("feeling-bad");
        self.tell("fear.over");
        self.perhaps(50, "fear.over");
        self.perhaps(40, "laugh");
        Ok(())
    }

    fn contest(&mut self) -> Result {
        self.join("B");
        self.new_thing("O", &["plant", "shiny", "food"]);
        self.tell("race.idea");
        self.perhaps(50, "agree");
        let low = self.choices().between(2, 40);
        let more = self.choices().between(1, 30);
        let wins = self.chance(50);
        let (own, others) = if wins { (low + more, low) } else { (low, low + more) };
        self.bind_number("K", 2, 4);
        self.tell("race.go");
        self.perhaps(60, "race.go");
        self.aside();
        for (role, number) in [("X", own), ("Y", others), ("Z", more)] {
            let word = lexicon().number(number);
            self.bind(role, word);
        }
        self.teller.labels.insert("comparison".into());
        self.tell("race.count");
        self.tell(if wins { "race.won" } else { "race.lost" });
        self.perhaps(70, "race.good");
        Ok(())
    }

    fn storm(&mut self) -> Result {
        self.join("B");
        let thing = self.new_thing("O", &["small", "toy", "music"]);
        self.bind_number("K", 3, 12);
        self.teller.say("{A+B} [~play|~walk|~be] {P.at}.", &[]);
        self.tell("storm.come");
        self.perhaps(60, "storm.come");
        let place = loop {
            let place = self.new_place("R");
            if self.teller.noun(place).is_some_and(|noun| noun.is("inside")) {
                break place;
            }
        };
        self.tell("storm.shelter");
        for role in ["A", "B"] {
            self.world.go(self.id(role), place);
        }
        self.arrive();
        self.mood("feeling-bad");
        self.world.put(thing, place);
        if self.chance(60) {
            self.tell("storm.find");
            let main = self.id("A");
            self.world.take(main, thing)?;
            self.world.own(main, thing);
            self.tell("storm.pass");
        } else {
            self.tell("comfort");
            self.tell("eat");
        }
        self.tell("storm.over");
        Ok(())
    }

    fn making(&mut self) -> Result {
        const THINGS: [(&[&str], [&str; 8]); 2] = [
            (&["food"], ["flour", "milk", "sugar", "butter", "honey", "salt", "cream", "cheese"]),
            (
                &["toy", "wear", "holder", "paper"],
                ["paper", "glue", "string", "wool", "cloth", "paint", "wire", "leather"],
            ),
        ];
        self.join("B");
        let (main, kind) = (self.id("A"), self.choices().below(2));
        let thing = match kind {
            0 => {
                const BAKED: [&str; 4] = ["cake", "pie", "cookie", "sandwich"];
                let baked: Vec<_> =
                    lexicon().objects.iter().filter(|noun| BAKED.contains(&noun.singular)).collect();
                let noun = *self.choices().pick(&baked);
                let thing = self.teller.thing(noun, 1);
                self.bind("O", thing);
                thing
            }
            _ => self.new_thing("O", &["toy"]),
        };
        self.tell("make.want");
        let chosen = self.choices().distinct(3, 8);
        for (role, place) in ["X", "Y", "Z"].into_iter().zip(chosen) {
            self.bind(role, THINGS[kind].1[place]);
        }
        self.tell("make.need");
        self.tell("make.have");
        self.new_place("R");
        self.tell("make.get");
        self.perhaps(40, "thank-c");
        self.aside();
        self.tell("make.work");
        self.perhaps(50, "make.work");
        self.world.own(main, thing);
        self.tell("make.done");
        self.perhaps(50, "joy");
        Ok(())
    }

    fn mystery(&mut self) -> Result {
        self.join("B");
        self.new_animal("N", &["wild", "farm", "pet"]);
        self.new_thing("O", &["wear", "small", "food"]);
        self.new_thing("T", &["tool"]);
        self.tell("odd.sign");
        self.perhaps(50, "odd.sign");
        self.tell("odd.guess");
        self.perhaps(50, "odd.guess");
        self.aside();
        self.tell("odd.follow");
        self.mood("feeling-bad");
        self.tell("odd.found");
        self.perhaps(70, "laugh");
        Ok(())
    }

    fn quarrel(&mut self) -> Result {
        self.join("B");
        let thing = self.new_thing("O", &["toy", "food", "soft", "music"]);
        let here = self.id("P");
        self.world.put(thing, here);
        self.new_animal("N", &["pet", "farm"]);
        self.teller.say("[There, {A+B} ~find {O.a}.|{O.A} ~lie <spot>.|{A+B} ~play with {O.a}.|Between {A.no} and {B.no} ~lie {O.a}.]", &[]);
        self.tell("quarrel.both");
        self.tell("quarrel.pull");
        self.perhaps(50, "quarrel.pull");
        self.tell("quarrel.end");
        self.mood("feeling-bad");
        self.tell("quarrel.peace");
        self.perhaps(40, "laugh");
        self.perhaps(40, "eat");
        Ok(())
    }

    fn key(&mut self) -> Result {
        let (main, here) = (self.id("A"), self.id("P"));
        self.join("B");
        let noun = lexicon().objects.iter().find(|noun| noun.singular == "key");
        let Some(noun) = noun else { return Ok(()) };
        let key = self.teller.thing(noun, 1);
        self.bind("O", key);
        self.world.put(key, here);
        self.world.take(main, key)?;
        self.tell("key.find");
        self.mood("thought");
        self.tell("key.try");
        self.perhaps(60, "key.try");
        self.new_place("R");
        self.travel(&["B"]);
        let chest: Vec<_> =
            lexicon().objects.iter().filter(|noun| ["chest", "box"].contains(&noun.singular)).collect();
        let noun = *self.choices().pick(&chest);
        let chest = self.teller.thing(noun, 1);
        self.bind("Q", chest);
        self.bind_message();
        self.bind_number("K", 3, 20);
        self.tell("key.fits");
        self.tell("key.inside");
        if self.chance(60) {
            self.join("G");
            self.tell("key.owner");
        } else {
            self.world.own(main, key);
        }
        Ok(())
    }

    fn stuck(&mut self) -> Result {
        let (main, thing) = (self.id("A"), self.new_thing("O", &["toy"]));
        self.join("B");
        self.join("G");
        self.new_thing("T", &["tool"]);
        self.new_animal("N", &["small"]);
        self.world.own(main, thing);
        self.teller.set_owner(thing, Some(main));
        self.teller.say("{A} ~play with {O.n}[ {P.at}|].", &[]);
        self.tell("stuck.up");
        self.tell("stuck.try");
        self.perhaps(60, "stuck.try");
        self.mood("feeling-bad");
        self.tell("stuck.down");
        self.tell("joy");
        Ok(())
    }

    fn learning(&mut self) -> Result {
        const SKILLS: [&str; 12] = [
            "whistle",
            "swim",
            "ride a bicycle",
            "stand on one hand",
            "play the guitar",
            "tie a sailor's knot",
            "skip stones",
            "bake bread",
            "catch a ball with one hand",
            "walk on stilts",
            "dance",
            "juggle",
        ];
        let skill = *self.choices().pick(&SKILLS);
        self.bind("X", skill);
        self.bind_day();
        self.bind_number("K", 3, 20);
        self.new_animal("N", &["pet", "farm"]);
        self.join("B");
        self.tell("learn.want");
        self.tell("learn.fail");
        self.mood("feeling-bad");
        self.perhaps(50, "learn.fail");
        self.tell("learn.practice");
        self.aside();
        self.perhaps(40, "learn.practice");
        self.tell("learn.can");
        self.perhaps(40, "joy");
        self.perhaps(50, "learn.teach");
        Ok(())
    }

    fn trades(&mut self) -> Result {
        let main = self.id("A");
        let first = self.new_thing("O", &["small", "toy", "food"]);
        let last = self.new_thing("V", &["toy", "music", "soft"]);
        self.world.own(main, first);
        self.tell("chain.start");
        let mut held = first;
        let others = if self.chance(50) { vec!["B", "C", "G"] } else { vec!["B", "C"] };
        for (place, role) in others.iter().enumerate() {
            self.aside();
            let other = self.id(role);
            let offered = match place + 1 == others.len() {
                true => last,
                false => self.new_thing("Q", &["small", "toy", "wear"]),
            };
            self.meet(role);
            self.world.own(other, offered);
            self.bind("O", held);
            self.bind("Q", offered);
            self.tell_as("chain.swap", &format!("B{role}"));
            self.world.give(main, other, held)?;
            self.world.give(other, main, offered)?;
            held = offered;
        }
        self.bind("O", first);
        self.tell("chain.done");
        self.bind("O", last);
        Ok(())
    }

    fn hide_and_seek(&mut self) -> Result {
        self.join("B");
        self.join("C");
        self.new_animal("N", &["pet"]);
        self.tell("seek.start");
        self.aside();
        self.tell("seek.first");
        self.tell("seek.last");
        self.perhaps(50, "seek.last");
        self.mood("feeling-bad");
        self.tell("seek.found");
        self.perhaps(50, "laugh");
        Ok(())
    }

    fn market(&mut self) -> Result {
        self.join("B");
        self.join("G");
        let main = self.id("A");
        let thing = self.new_thing("O", &["toy", "wear", "dish", "food"]);
        let paid = self.choices().between(2, 30);
        let left = self.choices().between(2, 30);
        for (role, number) in [("X", paid + left), ("Y", paid), ("Z", left)] {
            let word = lexicon().number(number);
            self.bind(role, word);
        }
        self.teller.labels.insert("sum".into());
        self.tell("market.have");
        self.new_place("R");
        self.travel(&["B"]);
        self.tell("market.price");
        self.mood("thought");
        self.tell("market.left");
        self.world.own(main, thing);
        self.perhaps(70, "market.more");
        Ok(())
    }

    fn seed(&mut self) -> Result {
        self.join("B");
        self.join("G");
        self.new_thing("O", &["plant"]);
        self.tell("grow.seed");
        self.tell("grow.wait");
        self.perhaps(70, "grow.wait");
        self.aside();
        self.tell("grow.green");
        self.perhaps(60, "grow.green");
        self.tell("grow.end");
        self.perhaps(40, "joy");
        Ok(())
    }

    fn bind_message(&mut self) {
        const MESSAGES: [&str; 14] = [
            "Look behind you",
            "Count the steps and turn left",
            "The owl knows",
            "Seven stones and a shoe",
            "Do not wait for me",
            "Who reads this owes me a song",
            "Under the oldest tree",
            "Go where the water is still",
            "Three knocks, then wait",
            "What you seek is near",
            "Ask the one with the red hat",
            "Not today, but soon",
            "Keep this, and keep quiet",
            "North, then east, then down",
        ];
        let mut message = (*self.choices().pick(&MESSAGES)).to_owned();
        if self.chance(60) {
            message = (0..self.choices().between(2, 4))
                .map(|_| self.choices().pick(invented()).clone())
                .collect::<Vec<_>>()
                .join(" ");
            message = capitalised(&message);
            self.teller.labels.insert("invented words".into());
        }
        self.bind("M", message);
    }

    fn note(&mut self) -> Result {
        self.join("B");
        self.join("C");
        let (main, here, thing) =
            (self.id("A"), self.id("P"), self.new_thing("O", &["holder", "shiny", "toy", "food"]));
        self.bind_message();
        self.tell("note.find");
        self.tell("note.again");
        self.perhaps(60, "note.again");
        self.mood("thought");
        self.world.put(thing, here);
        self.tell("note.solve");
        self.world.take(main, thing)?;
        self.world.own(main, thing);
        self.perhaps(50, "joy");
        Ok(())
    }

    fn newcomer(&mut self) -> Result {
        self.bind_day();
        let friend = self.id("B");
        self.stranger();
        self.join("B");
        self.new_thing("O", &["toy"]);
        let word = self.choices().pick(invented()).clone();
        self.bind("W", word);
        self.tell("new.come");
        self.mood("thought");
        self.tell("new.first");
        self.perhaps(40, "new.first");
        self.tell("new.find");
        self.perhaps(50, "new.find");
        self.perhaps(40, "eat");
        if self.teller.is_mentioned(friend) {
            self.bind("B", friend);
        }
        Ok(())
    }

    fn night(&mut self) -> Result {
        self.join("B");
        self.join("G");
        self.new_thing("T", &["tool"]);
        self.new_thing("O", &["toy", "wear", "music"]);
        self.new_animal("N", &["pet", "wild"]);
        self.teller.paragraph();
        self.tell("night.awake");
        self.perhaps(50, "night.awake");
        self.tell("night.sound");
        self.perhaps(50, "night.sound");
        self.mood("feeling-bad");
        self.tell("night.go");
        self.tell("night.reason");
        self.tell("night.end");
        Ok(())
    }
}
