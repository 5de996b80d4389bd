--[[
Gives the group up. A repeated yield is answered like the first, and so is one of a lease that lost data took along.
ARGV  1 floor  2 lease id  3 token, or '' where an operator yields for a job  4 that operator, or ''
Reply ok pending_waiters kept counter   (kept 1: nobody waits, so the state stays on the device)
      not_holder holder_job holder_token counter taken_by why
Events LeaseYielded, and what advance and reap emit
--]]
-- @include group waiters residency lease advance
local lease, token = ARGV[2], ARGV[3]

begin(true, FIELD_MAX)
local number = token == '' and 0 or check_number('token', tonumber(token))
-- As for a renewal: less than our token means that the server forgot our grant. Then the lease stood until now.
local forgotten = S.token < number and S.swap_id < number and S.fence <= number and not has_ended(lease)
local mine = S.lease_id == lease and (token == '' or S.token == number)
if not mine and not forgotten then
  local by, why = taken_by(lease)
  if has_ended(lease) and by == '' then
    local pending = redis.call('ZCARD', queue_key)
    return { 'ok', pending, pending == 0 and 1 or 0, S.counter }
  end
  return { 'not_holder', S.job, S.token, S.counter, by, why }
end
if forgotten then
  floor = math.max(floor, number) -- it proves the loss, too
end
settle_clock()
if mine then
  end_lease('LeaseYielded', 'by', ARGV[4])
elseif S.lease_id == '' then
  set('token', number) -- so that nobody puts an older lease back
end
remember_ended(lease)
local pending = redis.call('ZCARD', queue_key)
if pending > 0 then
  reap()
  advance()
end
save()
return { 'ok', pending, pending == 0 and 1 or 0, S.counter }
