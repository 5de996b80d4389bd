--[[
Gives the group up. A repeated yield is answered like the first.
ARGV  1 floor  2 lease id  3 token, or '' where an operator yields for a job
Reply ok pending_waiters kept counter   (kept 1: nobody waits, so the state stays on the device)
      not_holder holder_job holder_token counter taken_by why
Events LeaseYielded, and what advance and reap emit
--]]
-- @include group waiters residency lease advance
local lease, token = ARGV[2], ARGV[3]

begin(true)
local mine = S.lease_id == lease and (token == '' or S.token == tonumber(token))
if not mine then
  local by, why = taken_by(lease)
  if has_ended(lease) and by == '' then
    local pending = redis.call('ZCARD', queue_key)
    return { 'ok', pending, pending == 0 and 1 or 0, S.counter }
  end
  return { 'not_holder', S.job, S.token, S.counter, by, why }
end
settle_clock()
end_lease('LeaseYielded')
remember_ended(lease)
local pending = redis.call('ZCARD', queue_key)
if pending > 0 then
  reap()
  advance()
end
save()
return { 'ok', pending, pending == 0 and 1 or 0, S.counter }
