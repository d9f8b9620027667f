// Ten tasks for a first-time user, using only the words on the page, on a desktop and a phone screen.
import { expect, test } from "./support.mjs";

for (const [name, width, height] of [["a desktop", 1280, 900], ["a phone", 400, 800]]) {
  test(`a first-time user completes ten tasks on ${name}`, async ({ gpt2 }) => {
    const { page } = gpt2;
    const button = (name) => page.getByRole("button", { name, exact: true });
    const field = (name) => page.getByLabel(name, { exact: false }).and(page.locator("input, textarea, select")).first();
    // Sends real key presses, because Playwright's `fill` keeps the old number in Firefox.
    const type = async (name, value) => {
      await field(name).focus();
      await page.keyboard.press("ControlOrMeta+a");
      await page.keyboard.type(value);
    };
    const text = page.getByRole("listbox", { name: "generated text" });
    await page.setViewportSize({ width, height });
    await gpt2.ready();
    const sideways = async () => expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBeLessThanOrEqual(width);

    // 1. What is this? The sentence and the beginning of a story are on the first screen.
    await expect(page.getByText("A language model that writes in front of you")).toBeInViewport();
    await expect(text).toBeInViewport();
    const story = await text.textContent();
    expect(story.length).toBeGreaterThan(50);
    await expect(page.getByText(/of this head's attention|divides its attention/)).toBeVisible();

    // 2. Another story from the same beginning.
    await button("Generate").click();
    await gpt2.ready();
    expect(await text.textContent()).not.toBe(story);

    // 3. One of the examples, then a new beginning with 20 tokens.
    await button("red blue green red blue green red").click();
    await gpt2.ready();
    await expect(field("Beginning of a text")).toHaveValue("red blue green red blue green red");
    await type("Beginning of a text", "Tom was sad because");
    await type("Length", "20");
    await button("Generate").click();
    await gpt2.ready();
    await expect(page.getByText(/^20 new tokens · /)).toBeVisible();

    // 4. The same text twice.
    await page.getByText("More settings").click();
    await type("Seed", "7");
    await button("Generate").click();
    await gpt2.ready();
    const seventh = await text.textContent();
    await button("Generate").click();
    await gpt2.ready();
    expect(await text.textContent()).toBe(seventh);

    // 5. Always the most probable token.
    await field("Greedy").check();
    await button("Generate").click();
    await gpt2.ready();
    await page.getByText("More settings").click();

    // 6. Another token in the middle, and a continuation from there.
    const before = await text.textContent();
    await text.getByRole("option").nth(3).click();
    const others = page.getByRole("listbox", { name: /^alternatives;/ }).getByRole("option");
    await expect(others.first()).toBeVisible();
    await others.nth(4).click();
    await gpt2.ready();
    expect(await text.textContent()).not.toBe(before);

    // 7. The bits of each token.
    await field("show bits").check();
    // Firefox returns `attr(data-bits)` instead of the attribute's value.
    expect(await text.evaluate(({ firstElementChild: one }) => getComputedStyle(one, "::after").content.replace("attr(data-bits)", one.dataset.bits))).toMatch(/\d/);

    // 8. What a head does, by a click on its picture.
    await page.getByRole("button", { name: /goes to the token just before/ }).first().click();
    await expect(page.locator("#report-role")).toContainText("goes to the token just before");

    // 9. Why the model wrote a token.
    await text.getByRole("option").nth(2).click();
    await button("Explain this token").click();
    await expect(page.getByRole("button", { name: /^logit of/ }).first()).toBeInViewport({ timeout: 120_000 });
    await expect(page.getByText("What adds to it")).toBeVisible();
    await sideways();

    // 10. The same text without the page.
    await page.getByText("Share or reproduce this text").click();
    await button("curl").click();
    await expect(page.getByText(/^curl -N/)).toBeVisible();
    await sideways();

    // Last, the model: which one it is, and which others there are.
    await page.getByRole("button", { name: /^Model:/ }).click();
    await expect(page.getByRole("dialog")).toBeVisible();
    await page.keyboard.press("Escape");
  });
}
